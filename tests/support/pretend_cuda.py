"""A CUDA device that computes on the CPU: real values, with the refusals and the costs of a GPU.

    with PretendCuda() as device:
        head = LSSVMHead(64, 3, device="cuda").add(x.cuda(), y.cuda())
        with device.counting() as cost:
            head.remove(x[:1].cuda(), y[:1].cuda()).w
        print(cost.synchronizations, cost.synchronized)

A :class:`PretendTensor` says that it is on cuda:0 and holds a CPU tensor. Each operation on it runs on the CPU tensor, after
the checks that a GPU makes: tensors of two devices are refused (a CPU tensor without dimensions may stand beside device tensors,
and indices may be on the CPU), so are integer matrix products and ``numpy()``. Synchronizations are counted, where a GPU makes
the host wait, as ``torch.cuda.set_sync_debug_mode`` reports it: scalars read, blocking copies in either direction, shapes that
depend on values (boolean masks, ``nonzero``, ``unique``), and the error checks of linear algebra.

It cannot show what happens when work is asynchronous (there are no streams and no pinned memory) nor the rounding of the GPU's
own libraries. Files written under it are read under it, as on a machine with the GPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)

COPIES = {aten._to_copy, aten.copy_, aten.copy}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
INTEGER_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten.addbmm}
"""Products that cuBLAS has for floating point numbers only."""
SCALAR_READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
VALUE_SHAPES = {
    aten.nonzero, aten.masked_select, aten._unique2, aten._unique, aten.unique_dim, aten.unique_consecutive,
    aten.unique_dim_consecutive, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
"""Operations whose result has a shape that depends on values, which the host has to read."""
ERROR_CHECKS = {
    aten._linalg_check_errors, aten._linalg_eigh, aten.linalg_eigh, aten._linalg_svd, aten.linalg_eig, aten._linalg_eigvals,
    aten.linalg_lstsq, aten.cholesky_inverse, aten.multinomial,
}  # fmt: skip
"""Operations that read an error code (or do part of the work) on the host."""
ON_REQUEST = {
    aten.linalg_cholesky_ex, aten.linalg_inv_ex, aten.linalg_lu_factor_ex, aten._linalg_solve_ex, aten.linalg_solve_ex,
    aten.linalg_ldl_factor_ex,
}  # fmt: skip
"""Factorizations that read their error code if ``check_errors`` is set."""


FACTORIZATIONS = ERROR_CHECKS | ON_REQUEST | {
    aten.linalg_solve_triangular, aten.triangular_solve, aten.linalg_qr, aten.cholesky_solve, aten.linalg_lu_solve,
}  # fmt: skip
"""Linear algebra that the GPU's libraries have for single and double precision only."""


SPECIAL = COPIES | INDEXED | INTEGER_PRODUCTS | SCALAR_READS | VALUE_SHAPES | FACTORIZATIONS
"""Operations about which there is more to say than that they are launched on tensors of one device."""


class Cost:
    """Times that the host waited for the device, by the operation's name."""

    def __init__(self) -> None:
        self.synchronized: Counter[str] = Counter()

    @property
    def synchronizations(self) -> int:
        """Number of times the host waited for the device."""
        return sum(self.synchronized.values())


class PretendTensor(torch.Tensor):
    """A tensor that says it is on cuda:0 and holds its values in a CPU tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendTensor:
        out: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=False,
        )
        out.inner = inner
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.tolist:
                return args[0].cpu().tolist()
            if func in (torch.Tensor.numpy, torch.Tensor.__array__):
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
                )
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                args = (args[0], as_indices(args[1]), *args[2:])
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendCuda.current().run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                memo[id(self)] = torch.nn.Parameter(memo[id(self)], self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __copy__(self) -> PretendTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self.detach().cpu(), isinstance(self, torch.nn.Parameter), self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.inner!r})"


def rebuild(values: torch.Tensor, parameter: bool, requires_grad: bool) -> torch.Tensor:
    """Read a tensor from a file: onto the device, or to where ``torch.load`` was told to map it."""
    if torch.device(PretendCuda.current().map_location or DEVICE).type == "cuda":
        values = values.to(DEVICE)
    return torch.nn.Parameter(values, requires_grad) if parameter else values.requires_grad_(requires_grad)


def as_indices(index: Any) -> Any:
    """Lists, tuples of lists and arrays as index tensors, as torch itself reads them."""
    if isinstance(index, tuple):
        return tuple(as_indices(i) if not isinstance(i, tuple) else torch.tensor(i) for i in index)
    if isinstance(index, list) or (type(index).__module__ == "numpy" and getattr(index, "ndim", 0)):
        return torch.as_tensor(index if not isinstance(index, list) or index else torch.zeros(0, dtype=torch.int64))
    return index


class FactoryCalls(TorchFunctionMode):
    """Calls that torch answers before it dispatches: tensors made from Python data, or moved there by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                return func(*args, **(kwargs | {"device": "cpu"})).to(device)
            if device is None and func is not torch.tensor and args and isinstance(args[0], PretendTensor):
                return args[0].to(kwargs.get("dtype", args[0].dtype))
        if func is torch.Tensor.new_tensor and isinstance(args[0], PretendTensor):
            device = kwargs.get("device") or DEVICE
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.tensor(args[1], dtype=dtype, device="cpu").to(device)
        return func(*args, **kwargs)


class PretendCuda(TorchDispatchMode):
    """Context in which "cuda" is a :class:`PretendTensor`'s device; what it patches in torch is as before at its end."""

    active: ClassVar[list[PretendCuda]] = []

    def __init__(self, product_error: float = 0.0) -> None:
        super().__init__()
        self.cost = Cost()
        self.product_error = product_error
        """Relative error added to float64 matrix products: a device that emulates them with too few bits."""
        self.map_location: Any = None
        """Where ``torch.load``, if it is running, was told to put tensors."""
        self.patches = contextlib.ExitStack()

    @classmethod
    def current(cls) -> PretendCuda:
        """The device that is on."""
        if not cls.active:
            raise RuntimeError("a PretendTensor is used after its PretendCuda has ended")
        return cls.active[-1]

    def __enter__(self) -> PretendCuda:
        torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
        stack = self.patches
        for name, answer in {
            "_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
            "set_device": None, "empty_cache": None, "manual_seed_all": None, "get_rng_state_all": [],
            "set_rng_state_all": None, "mem_get_info": (1 << 34, 1 << 34), "get_device_capability": (8, 0),
            "_exchange_device": 0, "_maybe_exchange_device": 0, "is_current_stream_capturing": False,
            "get_device_properties": SimpleNamespace(name="pretend", major=8, minor=0, total_memory=1 << 34),
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *a, _out=answer, **k: _out))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", self.synchronize))
        lifting = torch._C._only_lift_cpu_tensors()  # type: ignore[attr-defined]
        torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifting)  # type: ignore[attr-defined]
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes parameters of the new class
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        stack.enter_context(torch.serialization.safe_globals([rebuild]))
        stack.enter_context(mock.patch.object(torch, "load", self.loading(torch.load)))
        stack.enter_context(FactoryCalls())
        self.active.append(self)
        stack.callback(self.active.remove, self)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.patches.close()

    def synchronize(self, *args: Any, **options: Any) -> None:
        """Count an explicit wait for the device."""
        self.cost.synchronized["synchronize"] += 1

    def loading(self, load: Any) -> Any:
        """``torch.load`` that leaves word of its ``map_location`` for :func:`rebuild`."""

        def wrapped(f: Any, map_location: Any = None, **options: Any) -> Any:
            self.map_location = map_location
            try:
                return load(f, map_location="cpu", **options)
            finally:
                self.map_location = None

        return wrapped

    @contextlib.contextmanager
    def counting(self) -> Iterator[Cost]:
        """Count what happens inside."""
        before, self.cost = self.cost, Cost()
        try:
            yield self.cost
        finally:
            before.synchronized += self.cost.synchronized
            self.cost = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    # -- one operation -----------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Check the devices, count, compute on the CPU, and wrap what is on the device."""
        if torch.is_inference_mode_enabled():  # a wrapper made in it has no version counter to share with its views
            with torch.inference_mode(False):
                return self.run(func, args, kwargs)
        packet = func.overloadpacket
        special, target = packet in SPECIAL, kwargs.get("device")
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        on_device = any(isinstance(t, PretendTensor) for t in tensors)
        if not on_device and (target is None or torch.device(target).type != "cuda"):
            return func(*args, **kwargs)  # nothing of the device in it
        if target is not None and torch.device(target).index not in (None, 0):
            raise RuntimeError(f"CUDA error: invalid device ordinal {target}: one device is pretended")
        check_devices(packet, args, tensors, special)
        if special:
            check_types(packet, tensors)
        cpu_args = [unwrap(a) for a in args]
        cpu_kwargs = {name: unwrap(a) for name, a in kwargs.items()}
        if target is not None:
            cpu_kwargs["device"] = torch.device("cpu")
        stays = (
            torch.device(target).type == "cuda"
            if target is not None
            else not (packet is aten.copy_ and not isinstance(args[0], PretendTensor))
        )
        if packet is aten._to_copy and stays != isinstance(args[0], PretendTensor):
            cpu_kwargs.pop("device")
        out = func(*cpu_args, **cpu_kwargs)
        found = list(tensors_in([out]))
        if special and (not found or any(t.numel() for t in found) or packet in VALUE_SHAPES | INDEXED):
            self.count(packet, args, kwargs, tensors)
        if self.product_error and packet in (aten.mm, aten.addmm, aten.bmm) and out.dtype == torch.float64:
            out = out * (1 + self.product_error)
        if torch.Tag.inplace_view in func.tags:  # squeeze_ and its kind: the wrapper's own shape changes too
            with no_dispatch():
                func(*args, **kwargs)
        if func._schema.is_mutable and isinstance(out, torch.Tensor):
            return kwargs["out"] if "out" in kwargs else args[0]
        return wrap(out) if stays else out

    def count(self, packet: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """Add one operation to the synchronizations if the host waits.

        Not called for results without elements, unless their shape had to be read: kernels return before they start for those.
        """
        between = {isinstance(t, PretendTensor) for t in tensors} | (
            {torch.device(kwargs["device"]).type == "cuda"} if kwargs.get("device") is not None else set()
        )
        masks = packet in INDEXED and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in (args[1] if len(args) > 1 else ())
        )
        host_indices = packet in INDEXED and any(
            t is not None and not isinstance(t, PretendTensor) and t.dim() for t in (args[1] if len(args) > 1 else ())
        )
        non_blocking = bool(kwargs.get("non_blocking")) or (packet is aten.copy_ and len(args) > 2 and bool(args[2]))
        checked = packet in ON_REQUEST and (bool(kwargs.get("check_errors")) or any(a is True for a in args[1:]))
        waits = (
            packet in SCALAR_READS
            or packet in ERROR_CHECKS
            or (packet in VALUE_SHAPES and kwargs.get("output_size") is None)
            or masks
            or host_indices
            or checked
            or (packet in COPIES and len(between) == 2 and not non_blocking)
        )
        if waits:
            self.cost.synchronized[packet.__name__] += 1


def check_devices(packet: Any, args: Any, tensors: list[torch.Tensor], special: bool) -> None:
    """Refuse what a GPU refuses: CPU tensors with dimensions beside tensors of the device."""
    hosts = [t for t in tensors if not isinstance(t, PretendTensor)]
    if not hosts or len(hosts) == len(tensors) or (special and packet in COPIES):
        return
    if special and packet in INDEXED:  # indices may be on the CPU
        tensors = list(tensors_in((args[0], *args[2:])))
        hosts = [t for t in tensors if not isinstance(t, PretendTensor)]
    all_scalars_on_device = all(t.dim() == 0 for t in tensors if isinstance(t, PretendTensor))
    for t in hosts:
        if t.dim() or (all_scalars_on_device and tensors[0] is t and packet.__name__.endswith("_")):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({packet})"
            )
    if packet in INTEGER_PRODUCTS and hosts:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({packet})")


def check_types(packet: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse products of integers and factorizations in half precision: the GPU's libraries have none."""
    if packet in INTEGER_PRODUCTS and any(not (t.is_floating_point() or t.is_complex()) for t in tensors):
        kind = next(t.dtype for t in tensors if not t.is_floating_point())
        raise RuntimeError(f'"{packet.__name__}_cuda" not implemented for {kind}')
    short = [t.dtype for t in tensors if t.is_floating_point() and t.element_size() < 4]
    if packet in FACTORIZATIONS and packet not in (aten._linalg_check_errors, aten.multinomial) and short:
        raise RuntimeError(f'"{packet.__name__}_cuda" not implemented for {short[0]}')


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments, and in its lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def unwrap(value: Any) -> Any:
    """The CPU tensors in an argument."""
    if isinstance(value, PretendTensor):
        return value.inner
    return type(value)(unwrap(v) for v in value) if type(value) in (list, tuple) else value


def wrap(value: Any) -> Any:
    """A result on the device."""
    if isinstance(value, torch.Tensor):
        return PretendTensor(value)
    return type(value)(wrap(v) for v in value) if type(value) in (list, tuple) else value
