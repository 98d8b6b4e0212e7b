"""More than two classes from machines for two, with exact adding and removing passed through."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.modes import atomically, exactly
from torchlssvm.functional.votes import votes
from torchlssvm.kernel_machines import input_checks
from torchlssvm.kernel_machines.sample_slots import SampleSlots

FORMAT = 1
"""Number of the format of a saved machine."""

MULTICLASS_TENSORS = ("x", "y", "weights", "ids", "names", "options")
"""The names of the tensors of a saved machine."""


class MultiClass(nn.Module):
    """The base of :class:`OneVsRest` and :class:`OneVsOne`: the samples, and the part of them that each machine learns."""

    _slots: SampleSlots
    _weighted: bool  # whether any sample came with a weight
    _own_ids: list[dict[int, int]]  # of each machine: an id here -> its own id

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
        self._clear(0, 0)

    # -- for subclasses --------------------------------------------------------------------------------------------------

    def _label(self, task: tuple[int, ...], label: int) -> int | None:
        """The label 0 or 1 of a sample in a task; None if the task does not see it."""
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
        """The ids held (n,), ascending."""
        return self._slots.ids

    @property
    def n(self) -> int:
        """The number of samples held."""
        return len(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """One score a class."""
        if not len(self):
            raise NotFittedError(f"the {type(self).__name__} holds no samples: call add(x, y) first")
        parts = [m.decision(x) if held else None for m, held in zip(self.machines, self._own_ids, strict=True)]  # type: ignore[operator]
        some = next(p for p in parts if p is not None)
        return self._scores(torch.stack([torch.zeros_like(some) if p is None else p for p in parts], 1))

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    # -- changing ------------------------------------------------------------------------------------------------------

    @atomically
    def add(self, x: Any, y: Any, weight: Any = None) -> Tensor:
        """Learn samples. x: (B, J); y: (B,) labels; weight: (B,), where machines take it. Returns ids (B,) for life.

        Every machine learns its part, or none does: an error of one leaves all of them, and the ids, as they were. The same
        holds for :meth:`remove` and :meth:`relabel`.
        """
        x = checks.as_tensor(x, "x", self._device)
        if x.ndim != 2 or (len(self) and x.shape[1] != self._slots.x.shape[1]):
            raise ValueError(
                f"x must have shape (B, {self._slots.x.shape[1] if len(self) else 'J'}), got {tuple(x.shape)}"
            )
        x = checks.features(x, x.shape[1], self._device).to(torch.float64)
        if checks.not_finite(x):
            checks.raise_not_finite("x", x)
        labels = self._label_list(y, x)
        weights = checks.weights(weight, x)
        if weights is not None and not self._weighs:
            raise ValueError(f"weight was given, but {type(self.machines[0]).__name__} takes none")
        if weights is not None and not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise ValueError("weight must be finite and > 0")
        if not len(x):
            return torch.zeros(0, dtype=torch.int64)
        slots = self._slots.copy() if len(self) else self._new_slots(x.shape[1], self._slots.next_id)
        weighted = self._weighted or weights is not None
        slots.release()
        places = slots.places(len(x))
        slots.grow(max(places) + 1)
        ids = slots.put(x, self._columns(labels, weights), places)
        self._change_machines(dict(zip(ids, labels, strict=True)), slots, weighted)
        self._slots, self._weighted = slots, weighted
        return torch.tensor(ids, dtype=torch.int64)

    @atomically
    def remove(self, ids: Any) -> Self:
        """Unlearn samples by id."""
        found = self._slots.find(ids)
        self._change_machines(dict.fromkeys(found), self._slots, self._weighted)
        slots = self._slots.copy()
        slots.drop(found)
        self._slots = slots if len(slots) else self._new_slots(0, slots.next_id)
        self._weighted = self._weighted and len(slots) > 0
        return self

    @atomically
    def relabel(self, ids: Any, y: Any) -> Self:
        """Give samples other labels; machines that do not see the new label lose the sample, others gain it."""
        found = self._slots.find(ids)
        if not found:
            return self
        labels = self._label_list(y, self._slots.x.new_empty(len(found), 0))
        slots = self._slots.copy()
        slots.columns[slots.at_ids(found), 0] = self._tensor(labels).to(torch.float64)
        self._change_machines(dict(zip(found, labels, strict=True)), slots, self._weighted)
        self._slots = slots
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new_slots(self, J: int, next_id: int) -> SampleSlots:
        slots = SampleSlots(J, 2, self._device)  # y: label and weight
        slots.next_id = next_id
        return slots

    def _clear(self, J: int, next_id: int) -> None:
        self._slots = self._new_slots(J, next_id)
        self._weighted, self._own_ids = False, [{} for _ in self.tasks]

    def _label_list(self, y: Any, x: Tensor) -> list[int]:
        labels: list[int] = input_checks.labels(y, x, self.num_classes).tolist()
        return labels

    def _tensor(self, labels: list[int]) -> Tensor:
        return torch.tensor(labels, dtype=torch.int64, device=self._device)

    def _columns(self, labels: list[int], weights: Tensor | None) -> Tensor:
        column = self._tensor(labels).to(torch.float64)
        return torch.stack([column, torch.ones_like(column) if weights is None else weights], 1)

    def _change_machines(self, labels: dict[int, int | None], slots: SampleSlots, weighted: bool) -> None:
        """Give samples these labels, None for none at all, in every machine, or in none: an error puts all of them back.

        slots: the samples, new ones included; weighted: whether machines are given weights.
        """
        before: dict[int, tuple[nn.Module, dict[int, int]]] = {}
        try:
            for t, task in enumerate(self.tasks):
                own_ids = self._own_ids[t]
                seen = {i: None if v is None else self._label(task, v) for i, v in labels.items()}
                staying = {i: a for i, a in seen.items() if i in own_ids and a is not None}
                joining = {i: a for i, a in seen.items() if i not in own_ids and a is not None}
                leaving = [i for i, a in seen.items() if i in own_ids and a is None]
                if staying or joining or leaving:
                    machine = self.machines[t]
                    before[t] = copy.deepcopy(machine), own_ids
                    self._own_ids[t] = dict(own_ids)
                    self._change_machine(t, staying, joining, leaving, slots, weighted)
        except BaseException:
            for t, (machine, own_ids) in before.items():
                self.machines[t], self._own_ids[t] = machine, own_ids
            raise

    def _change_machine(
        self, t: int, staying: dict[int, int], joining: dict[int, int], leaving: list[int], slots: SampleSlots, weighted: bool
    ) -> None:  # fmt: skip
        machine: Any = self.machines[t]
        own_ids = self._own_ids[t]
        if staying:
            machine.relabel([own_ids[i] for i in staying], self._tensor(list(staying.values())))
        if leaving:
            machine.remove(torch.tensor([own_ids.pop(i) for i in leaving], dtype=torch.int64))
        if joining:
            at = slots.at_ids(list(joining))
            more = {"weight": slots.y[at, 1]} if weighted else {}
            given = machine.add(slots.x[at], self._tensor(list(joining.values())), **more)
            own_ids.update(zip(joining, given.tolist(), strict=True))

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; no dtype changes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._device = fn(torch.empty(0, device=self._device)).device
        self._slots.to(self._device)
        return self

    @exactly
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        slots, order = self._slots, self._slots.order()
        # Each machine's own id of each sample, -1 for none: (tasks, n).
        names = [[held.get(i, -1) for i in slots.slot_of] for held in self._own_ids]
        options = json.dumps(
            {"format": FORMAT, "form": type(self).__name__, "num_classes": self.num_classes, "next_id": slots.next_id}
        )
        destination |= {
            prefix + "x": slots.x[order],
            prefix + "y": slots.y[order, 0].to(torch.int64),
            prefix + "weights": slots.y[order, 1],
            prefix + "ids": slots.ids,
            prefix + "names": torch.tensor(names, dtype=torch.int64).reshape(len(self.tasks), len(slots)),
            prefix + "options": bytes_to_tensor(options.encode()),
        }

    @atomically
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Take over a saved state, as ``nn.Module`` does; if any machine refuses its part, all are as they were."""
        before = copy.deepcopy(self)
        try:
            return super().load_state_dict(*args, **options)
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise

    @atomically
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = {k: state_dict[prefix + k] for k in MULTICLASS_TENSORS if prefix + k in state_dict}
        others = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in MULTICLASS_TENSORS}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing = [prefix + k for k in MULTICLASS_TENSORS if k not in mine]
        missing_keys += missing
        if missing:
            return
        try:
            options = json.loads(tensor_to_bytes(mine["options"]).decode())
            if options["format"] != FORMAT:
                raise ValueError(f"the state has the format {options['format']}, this version reads {FORMAT}")
            if options["form"] != type(self).__name__ or options["num_classes"] != self.num_classes:
                raise ValueError(f"the state is that of {options['form']} with {options['num_classes']} classes")
            ids, x = mine["ids"].tolist(), mine["x"].to(device=self._device, dtype=torch.float64)
            if len(ids) != len(x) or tuple(mine["names"].shape) != (len(self.tasks), len(ids)):
                raise ValueError(f"{len(x)} rows, {len(ids)} ids and names {tuple(mine['names'].shape)} do not fit")
            weights = mine["weights"].to(device=self._device, dtype=torch.float64)
            if tuple(weights.shape) != (len(ids),):
                raise ValueError(f"{len(ids)} ids and weights {tuple(weights.shape)} do not fit")
            self._clear(x.shape[1], int(options["next_id"]))
            self._weighted = self._weighs and bool((weights != 1).any())
            self._slots.load(x, self._columns(mine["y"].tolist(), weights), ids, int(options["next_id"]))
            for held, row in zip(self._own_ids, mine["names"].tolist(), strict=True):
                held.update({i: name for i, name in zip(ids, row, strict=True) if name >= 0})
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            error_msgs.append(f"{type(self).__name__}: {error}")

    def extra_repr(self) -> str:
        """Describe the machine: count and classes."""
        return f"n={self.n}, num_classes={self.num_classes}"


class OneVsRest(MultiClass):
    """K machines, machine k for class k against all others; the score of a class is its machine's decision.

    Args:
        machine: an empty machine for two classes, or a function that makes one; it is copied for each class.
        num_classes: K.

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
    """One machine for each pair of classes i < j, which sees their samples alone; scores are votes.

    Ties are broken by the sum of the decisions. A pair of classes without samples abstains. Arguments and use are those of
    :class:`OneVsRest`.
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
