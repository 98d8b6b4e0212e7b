"""Several classes from machines for two classes, with exact adding and removing."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.modes import all_or_nothing, atomically, exactly
from torchlssvm.functional.module_state import device_after, load_saved, split_saved
from torchlssvm.functional.votes import votes
from torchlssvm.kernels import Linear, input_checks
from torchlssvm.kernels.gram_rows import GramRows, mostly_free

FORMAT = 1
"""Number of the format of a saved machine."""

MULTICLASS_TENSORS = ("x", "y", "weights", "ids", "names", "options")
"""The names of the tensors of a saved machine."""


class Held(NamedTuple):
    """A sample in the machine."""

    place: int  # in the store of samples
    label: int
    weight: float


class Part(NamedTuple):
    """The part of a change that one machine has."""

    t: int  # the number of the machine
    leaving: list[int]  # ids of samples that it unlearns
    joining: dict[int, int]  # samples that it learns: id -> label 0 or 1
    moving: dict[int, int]  # its samples that get another label: id -> label


class MultiClass(nn.Module):
    """The base of :class:`OneVsRest` and :class:`OneVsOne`: the samples, and the part of them that each machine learns.

    To save memory and time, machines that support it (:class:`~torchlssvm.IncrementalSVM`) share the samples and the rows of
    their kernel matrix. Each sample is then stored once, and each row computed once, for all machines.
    """

    _own_ids: list[dict[int, int]]  # of each machine: an id here -> its own id
    _support: tuple[list[Any], Tensor, list[Tensor]] | None  # of all machines, once it has been asked for

    def __init__(self, machine: nn.Module | Callable[[], nn.Module], num_classes: int, tasks: list[tuple[int, ...]]):
        super().__init__()
        empty: Any = machine if isinstance(machine, nn.Module) else machine()
        verbs = [v for v in ("add", "remove", "relabel", "decision") if not callable(getattr(empty, v, None))]
        if verbs:
            raise TypeError(f"machine must have add, remove, relabel and decision; {empty!r} lacks {', '.join(verbs)}")
        if len(empty) if hasattr(empty, "__len__") else 0:
            raise ValueError("machine must be empty: it is copied for each task")
        if getattr(empty, "num_classes", 2) != 2:
            raise ValueError(f"machine must be for two classes, it is for {empty.num_classes}")
        if getattr(empty, "budget", None) is not None:
            raise ValueError("machine must have no budget: machines that drop samples on their own cannot share ids")
        self.num_classes, self.tasks = num_classes, tasks
        self.machines = nn.ModuleList(copy.deepcopy(empty) for _ in tasks)
        self._weighs = "weight" in inspect.signature(empty.add).parameters
        self._device = torch.device(getattr(empty, "device", "cpu"))
        self._clear(0)

    # -- for subclasses --------------------------------------------------------------------------------------------------

    def _label(self, task: tuple[int, ...], label: int) -> int | None:
        """Return the label 0 or 1 of a sample in a task; None if the task does not use it."""
        raise TypeError(f"{type(self).__name__} must define _label")

    def _scores(self, decisions: Tensor) -> Tensor:
        """(B, tasks) -> (B, K)."""
        raise TypeError(f"{type(self).__name__} must define _scores")

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self._device

    @property
    def ids(self) -> Tensor:
        """The ids of the machine's samples (n,), ascending."""
        return torch.tensor(list(self._held), dtype=torch.int64)

    @property
    def n(self) -> int:
        """The number of samples in the machine."""
        return len(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Return one score per class (B, K)."""
        if not len(self):
            raise NotFittedError(f"the {type(self).__name__} holds no samples: call add(x, y) first")
        machines: list[Any] = list(self.machines)
        shared = self._shared and all(machine._solver.rows.gram is self._gram for machine in machines)
        if shared and not machines[0].kernel_has_gradient():
            return self._scores(self._shared_decisions(x))
        parts = [m.decision(x) if held else None for m, held in zip(self.machines, self._own_ids, strict=True)]  # type: ignore[operator]
        some = next(p for p in parts if p is not None)
        return self._scores(torch.stack([torch.zeros_like(some) if p is None else p for p in parts], 1))

    def _shared_decisions(self, x: Tensor) -> Tensor:  # (B, J) -> (B, tasks)
        """Compute the decisions of all machines from one kernel matrix, between x and all support vectors."""
        machines: list[Any] = list(self.machines)
        parts = [m.shared_support() for m in machines]
        if self._support is None or any(a is not b for a, b in zip(parts, self._support[0], strict=True)):
            used, where = np.unique(np.concatenate([places for places, _ in parts]), return_inverse=True)
            ends = np.cumsum([len(places) for places, _ in parts]).tolist()
            index = torch.from_numpy(where).to(self._device)
            columns = [index[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            self._support = parts, self._gram.rows_at(used), columns
        _, rows, columns = self._support
        kernel = self._gram.kernel
        assert kernel is not None
        K = kernel.tiled(machines[0].prepared(x), rows)
        f = [K[:, c] @ alpha + m.b for m, c, (_, alpha) in zip(machines, columns, parts, strict=True)]
        return torch.stack(f, 1)

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Return the class with the highest score (B,). Raises ValueError if a row contains NaN."""
        return checks.finite_scores(self(x)).argmax(1)

    def planned_bytes(self, n: int, J: int) -> int:
        """Estimate the memory, in bytes, that all machines need for n samples of width J, divided evenly among classes."""
        K, machines = self.num_classes, list(self.machines)
        used = [sum(self._label(task, k) is not None for k in range(K)) for task in self.tasks]
        return 8 * n * J + sum(m.planned_bytes(n * some // K, J) for m, some in zip(machines, used, strict=True))  # type: ignore[operator]

    # -- changing ------------------------------------------------------------------------------------------------------

    @atomically
    def add(self, x: Any, y: Any, weight: Any = None) -> Tensor:
        """Learn samples x (B, J) with labels y (B,), and weight (B,) if the machines accept it; return permanent ids (B,).

        If one machine raises an error, all machines and ids stay unchanged. This also holds for :meth:`remove` and
        :meth:`relabel`.
        """
        x = checks.as_tensor(x, "x", self._device)
        kernel, J = self._gram.kernel, self._gram.x.shape[1]
        deep = self._shared and kernel is not None and kernel.deep
        if x.ndim != 2 or (len(self) and x.shape[1] != J and not deep):
            raise ValueError(f"x must have shape (B, {J if len(self) else 'J'}), got {tuple(x.shape)}")
        x = checks.features(x, x.shape[1], self._device).to(torch.float64)
        rows = kernel.prepare(x).to(torch.float64) if deep and kernel is not None else x
        if checks.not_finite(rows):
            checks.raise_not_finite("x", rows)
        labels: list[int] = input_checks.labels(y, x, self.num_classes).tolist()
        weights = checks.weights(weight, x)
        if weights is not None and not self._weighs:
            raise ValueError(f"weight was given, but {type(self.machines[0]).__name__} takes none")
        if weights is not None and not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise ValueError("weight must be finite and > 0")
        if not len(x):
            return torch.zeros(0, dtype=torch.int64)
        self._connect()
        numbers = [1.0] * len(x) if weights is None else weights.tolist()
        ids = list(range(self._next_id, self._next_id + len(x)))
        places = self._put(rows)
        new = {i: Held(*sample) for i, *sample in zip(ids, places.tolist(), labels, numbers, strict=True)}
        with all_or_nothing(self, lambda: self._erase(places)):
            if self._shared and len(x) > 32:  # most rows will be needed
                self._gram.fill_cache()
            self._change_machines(new)
        self._held |= new
        self._next_id += len(x)
        return torch.tensor(ids, dtype=torch.int64)

    @atomically
    def remove(self, ids: Any) -> Self:
        """Unlearn samples by id."""
        found = input_checks.known_ids(ids, self._held)
        self._connect()
        self._change_machines(dict.fromkeys(found))
        self._erase(np.array([self._held.pop(i).place for i in found], dtype=np.int64))
        if mostly_free(self._gram.capacity, self.n):
            self._store_again()
        return self

    @atomically
    def relabel(self, ids: Any, y: Any) -> Self:
        """Change the labels of samples. A sample moves to the machines that learn its new label."""
        found = input_checks.known_ids(ids, self._held)
        if found:
            labels = input_checks.labels(y, self._gram.x.new_empty(len(found), 0), self.num_classes).tolist()
            self._connect()
            new = {i: self._held[i]._replace(label=label) for i, label in zip(found, labels, strict=True)}
            self._change_machines(new)
            self._held |= new
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _clear(self, next_id: int) -> None:
        machine: Any = self.machines[0]
        gram = machine.new_gram() if hasattr(machine, "new_gram") else None
        self._shared = gram is not None
        self._gram: GramRows = gram or GramRows(Linear(), self._device, 0)
        self._held: dict[int, Held] = {}  # in the order of ids
        self._free: list[int] = []  # places
        self._support = None
        self._own_ids, self._next_id = [{} for _ in self.tasks], next_id

    def _put(self, rows: Tensor) -> Any:  # (B, J) -> (B,) int64
        """Store rows; returns their places."""
        gram, n = self._gram, self.n + len(rows)
        capacity = gram.capacity if n <= gram.capacity else 16 + n + n // 8
        self._free = [*range(capacity - 1, gram.capacity - 1, -1), *self._free]
        gram.resize(capacity, rows.shape[1])
        places = np.array([self._free.pop() for _ in rows], dtype=np.int64)
        gram.put(places, rows, places[:0])
        return places

    def _erase(self, places: Any) -> None:  # (k,)
        if len(places):
            self._gram.erase(places)
            self._free += places[::-1].tolist()
            self._support = None

    def _connect(self) -> None:
        """Let all machines whose kernel is the shared one use the shared samples."""
        if not self._shared:
            return
        kernel = self._gram.kernel
        assert kernel is not None
        if kernel.version() != self._gram.version:
            for machine in self.machines:
                machine.notice_kernel()  # type: ignore[operator]
            self._store_again()
        for machine, own_ids in zip(self.machines, self._own_ids, strict=True):
            if not machine.shares(self._gram) and machine.kernel.equals(kernel):  # type: ignore[operator, union-attr]
                machine.share(self._gram, {own: self._held[i].place for i, own in own_ids.items()})  # type: ignore[operator]

    def _store_again(self) -> None:
        """Move the samples to a new store, in the order of ids."""
        old, held = self._gram, self._held
        x = old.rows_at(np.array([sample.place for sample in held.values()], dtype=np.int64))
        sharing = [self._shared and machine.shares(old) for machine in self.machines]  # type: ignore[operator]
        self._gram = GramRows(old.kernel, self._device, old.cache_bytes)
        self._held, self._free, self._support = {}, [], None
        places = self._put(x) if len(x) else np.zeros(0, dtype=np.int64)
        self._held = {i: s._replace(place=p) for (i, s), p in zip(held.items(), places.tolist(), strict=True)}
        for machine, own_ids, shared in zip(self.machines, self._own_ids, sharing, strict=True):
            if shared:
                machine.share(self._gram, {own: self._held[i].place for i, own in own_ids.items()})  # type: ignore[operator]

    def _parts(self, samples: dict[int, Held] | dict[int, None]) -> Iterator[Part]:
        """Yield the part of each machine that has one in a change: these samples are learned, those given as None unlearned."""
        for t, task in enumerate(self.tasks):
            own_ids = self._own_ids[t]
            labels = {i: None if s is None else self._label(task, s.label) for i, s in samples.items()}
            leaving = [i for i, label in labels.items() if i in own_ids and label is None]
            joining = {i: label for i, label in labels.items() if i not in own_ids and label is not None}
            staying = {i: label for i, label in labels.items() if i in own_ids and label is not None}
            moving = {i: label for i, label in staying.items() if label != self._label(task, self._held[i].label)}
            if leaving or joining or moving:
                yield Part(t, leaving, joining, moving)

    def _change_machines(self, samples: dict[int, Held] | dict[int, None]) -> None:
        """Let every machine learn these samples, or unlearn samples given as None. If one machine raises, none changes."""
        machines: list[Any] = list(self.machines)
        parts, finish = list(self._parts(samples)), []
        sharing = [part for part in parts if self._shared and machines[part.t].shares(self._gram)]
        shared = {part.t: self._shared_change(part, samples) for part in sharing}
        with contextlib.ExitStack() as changes:
            if shared:
                together = [(machines[t], *change) for t, change in shared.items()]
                changes.enter_context(machines[0].moving_together(together))
            for part in parts:
                t, machine, own_ids = part.t, machines[part.t], self._own_ids[part.t]
                changes.enter_context(all_or_nothing(self, functools.partial(self._own_ids.__setitem__, t, own_ids)))
                self._own_ids[t] = own_ids = dict(own_ids)
                if t in shared:
                    done = machine.begin_change(*shared[t])
                    changes.enter_context(all_or_nothing(machine, done.put_back))
                    finish.append(done.finish)
                    for i in part.leaving:
                        del own_ids[i]
                    own_ids.update(zip([*part.joining, *part.moving], done.ids, strict=True))
                else:
                    put_back = functools.partial(self.machines.__setitem__, t, copy.deepcopy(machine))
                    changes.enter_context(all_or_nothing(self, put_back))
                    self._change_machine(part, samples)
        for step in finish:
            step()

    def _shared_change(self, part: Part, samples: Any) -> tuple[Any, Any, Any, list[int]]:
        """Return places, labels and weights of the samples that a machine learns, and its own ids of those it unlearns."""
        labels, own_ids = part.joining | part.moving, self._own_ids[part.t]
        return (
            np.array([samples[i].place for i in labels], dtype=np.int64),
            np.array(list(labels.values()), dtype=float),
            np.array([samples[i].weight for i in labels]),
            [own_ids[i] for i in (*part.leaving, *part.moving)],
        )

    def _change_machine(self, part: Part, samples: Any) -> None:
        """Change a machine that keeps samples of its own."""
        machine: Any = self.machines[part.t]
        own_ids = self._own_ids[part.t]
        if part.moving:
            machine.relabel([own_ids[i] for i in part.moving], self._tensor(part.moving.values()))
        if part.leaving:
            machine.remove(torch.tensor([own_ids.pop(i) for i in part.leaving], dtype=torch.int64))
        if part.joining:
            new = [samples[i] for i in part.joining]
            weighted = any(s.weight != 1.0 for s in new)
            more = {"weight": torch.tensor([s.weight for s in new], device=self._device)} if weighted else {}
            x = self._gram.rows_at(np.array([s.place for s in new], dtype=np.int64))
            given = machine.add(x, self._tensor(part.joining.values()), **more)
            own_ids.update(zip(part.joining, given.tolist(), strict=True))

    def _tensor(self, labels: Any) -> Tensor:
        return torch.tensor(list(labels), dtype=torch.int64, device=self._device)

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; no dtype changes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = device_after(fn, self._device)
        if device != self._device:
            held, x = self._held, self._x()
            self._device = device
            self._restore(held, x, self._own_ids, self._next_id)
        return self

    @exactly
    def _x(self) -> Tensor:  # -> (n, J)
        """Copy the rows of the machine's samples, in the order of ids."""
        return self._gram.rows_at(np.array([s.place for s in self._held.values()], dtype=np.int64))

    def _restore(self, held: dict[int, Held], x: Tensor, own_ids: list[dict[int, int]], next_id: int) -> None:
        """Take over samples, with rows x (n, J), and the ids that each machine uses for them."""
        self._clear(next_id)
        places = self._put(x.to(device=self._device, dtype=torch.float64)) if len(x) else []
        self._held = {i: s._replace(place=int(p)) for (i, s), p in zip(held.items(), places, strict=True)}
        self._own_ids = own_ids

    @exactly
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        samples = self._held.values()
        # The id that each machine uses for each sample, -1 for none: (tasks, n).
        names = [[own.get(i, -1) for i in self._held] for own in self._own_ids]
        options = json.dumps(
            {"format": FORMAT, "form": type(self).__name__, "num_classes": self.num_classes, "next_id": self._next_id}
        )
        destination |= {
            prefix + "x": self._x(),
            prefix + "y": self._tensor(s.label for s in samples),
            prefix + "weights": torch.tensor([s.weight for s in samples], dtype=torch.float64, device=self._device),
            prefix + "ids": self.ids,
            prefix + "names": torch.tensor(names, dtype=torch.int64).reshape(len(self.tasks), len(self)),
            prefix + "options": bytes_to_tensor(options.encode()),
        }

    @atomically
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load a saved state, as ``nn.Module`` does. If any machine rejects its part, no machine changes."""
        before = copy.deepcopy(self)
        with all_or_nothing(self, lambda: self.__dict__.update(before.__dict__)):
            result = super().load_state_dict(*args, **options)
            self._connect()
        return result

    @atomically
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine, others = split_saved(state_dict, prefix, MULTICLASS_TENSORS)
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        load_saved(self, mine, prefix, MULTICLASS_TENSORS, missing_keys, error_msgs)

    def _load(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state; ValueError if it does not fit."""
        options = json.loads(tensor_to_bytes(state["options"]).decode())
        if options["format"] != FORMAT:
            raise ValueError(f"the state has the format {options['format']}, this version reads {FORMAT}")
        if options["form"] != type(self).__name__ or options["num_classes"] != self.num_classes:
            raise ValueError(f"the state is that of {options['form']} with {options['num_classes']} classes")
        ids, labels, weights = (state[name].tolist() for name in ("ids", "y", "weights"))
        if len(state["x"]) != len(ids) or tuple(state["names"].shape) != (len(self.tasks), len(ids)):
            raise ValueError(
                f"{len(state['x'])} rows, {len(ids)} ids and names {tuple(state['names'].shape)} do not fit"
            )
        held = {i: Held(-1, label, weight) for i, label, weight in zip(ids, labels, weights, strict=True)}
        own_ids = [{i: name for i, name in zip(ids, row, strict=True) if name >= 0} for row in state["names"].tolist()]
        self._restore(held, state["x"], own_ids, int(options["next_id"]))

    def __getstate__(self) -> dict[str, Any]:
        """The module with a copy of the samples instead of the store, which has caches and free places."""
        return self.__dict__ | {"_gram": self._x(), "_free": [], "_support": None}

    @exactly
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._restore(self._held, state["_gram"], self._own_ids, self._next_id)
        self._connect()

    def extra_repr(self) -> str:
        """Describe the machine: count and classes."""
        return f"n={self.n}, num_classes={self.num_classes}"


class OneVsRest(MultiClass):
    """Classify K classes with one machine per class, trained against all others. A score is the decision of a machine.

    Args:
        machine: an empty machine for two classes, which is copied for each class, or a function that creates one.
        num_classes: K, the number of classes.

    Example:
        >>> import torch
        >>> from torchlssvm import LagrangianSVM
        >>> from torchlssvm.kernels import RBF
        >>> svm = OneVsRest(LagrangianSVM(RBF(sigma=1.0), C=10.0), num_classes=3)
        >>> ids = svm.add(torch.tensor([[0.0], [3.0], [6.0]]), torch.tensor([0, 1, 2]))
        >>> svm.predict(torch.tensor([[0.5], [3.5], [5.0]]))
        tensor([0, 1, 2])
        >>> svm.remove(ids[1:2]).predict(torch.tensor([[4.0]]))
        tensor([2])
    """

    def __init__(self, machine: nn.Module | Callable[[], nn.Module], num_classes: int):
        super().__init__(machine, num_classes, [(k,) for k in range(_classes(num_classes))])

    def _label(self, task: tuple[int, ...], label: int) -> int | None:
        return int(label == task[0])

    def _scores(self, decisions: Tensor) -> Tensor:
        return decisions


class OneVsOne(MultiClass):
    """Classify K classes with one machine per pair of classes i < j, trained only on the samples of these two classes.

    Scores are votes, and the sum of the decisions breaks ties. A pair of classes without samples abstains. The arguments are
    those of :class:`OneVsRest`.
    """

    def __init__(self, machine: nn.Module | Callable[[], nn.Module], num_classes: int):
        super().__init__(machine, num_classes, list(itertools.combinations(range(_classes(num_classes)), 2)))

    def _label(self, task: tuple[int, ...], label: int) -> int | None:
        return int(label == task[0]) if label in task else None

    def _scores(self, decisions: Tensor) -> Tensor:
        return votes(decisions, self.num_classes)


def _classes(K: Any) -> int:
    if isinstance(K, bool) or not isinstance(K, int) or K < 2:
        raise ValueError(f"num_classes must be a whole number >= 2, got {K!r}")
    return K
