"""More than two classes from machines for two, with exact adding and removing passed through."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.votes import votes
from torchlssvm.machines.rows import Rows

if TYPE_CHECKING:
    from typing_extensions import Self

SAVED = ("x", "y", "ids", "names", "options")
WEIGHTS = "weights"  # saved too; ones in files without them


class MultiClass(nn.Module):
    """The base of :class:`OneVsRest` and :class:`OneVsOne`: which machine sees which sample under which label."""

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

    # -- what the two forms differ in ------------------------------------------------------------------------------------

    def _label(self, task: tuple[int, ...], label: int) -> int | None:
        """The label 0 or 1 of a sample in a task; None if the task does not see it."""
        raise TypeError(f"{type(self).__name__} must define _label")

    def _scores(self, decisions: Tensor) -> Tensor:
        """(B, tasks) -> (B, K)."""
        raise TypeError(f"{type(self).__name__} must define _scores")

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self._device

    @property
    def ids(self) -> Tensor:
        """The ids held (n,), ascending."""
        return self._rows.ids

    @property
    def n(self) -> int:
        """The number of samples held."""
        return len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """One score a class."""
        if not len(self):
            raise NotFittedError(f"the {type(self).__name__} holds no samples: call add(x, y) first")
        parts = [m.decision(x) if len(names) else None for m, names in zip(self.machines, self._names_in, strict=True)]  # type: ignore[operator]
        some = next(p for p in parts if p is not None)
        return self._scores(torch.stack([torch.zeros_like(some) if p is None else p for p in parts], 1))

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    # -- changing ------------------------------------------------------------------------------------------------------

    @exactly
    def add(self, x: Any, y: Any, weight: Any = None) -> Tensor:
        """Learn samples. x: (B, J); y: (B,) labels; weight: (B,), where machines take it. Returns ids (B,) for life."""
        x = checks.as_tensor(x, "x", self._device)
        if x.ndim != 2 or (len(self) and x.shape[1] != self._rows.x.shape[1]):
            raise ValueError(
                f"x must have shape (B, {self._rows.x.shape[1] if len(self) else 'J'}), got {tuple(x.shape)}"
            )
        x = checks.features(x, x.shape[1], self._device).to(torch.float64)
        finite = checks.to_host(torch.isfinite(x).all())
        if finite is not None and not finite[0][0]:
            checks.raise_not_finite("x", x)
        labels = self._labels(y, x)
        weights = checks.weights(weight, x)
        if weights is not None and not self._weighs:
            raise ValueError(f"weight was given, but {type(self.machines[0]).__name__} takes none")
        host = None if weights is None else checks.to_host((torch.isfinite(weights) & (weights > 0)).all())
        if host is not None and not host[0][0]:
            raise ValueError("weight must be finite and > 0")
        if not len(x):
            return torch.zeros(0, dtype=torch.int64)
        if not len(self) and x.shape[1] != self._rows.x.shape[1]:
            self._clear(x.shape[1], self._rows.next_id)
        self._weighted |= weights is not None
        self._rows.release()
        places = self._rows.places(len(x))
        self._rows.grow(max(places) + 1)
        ids = self._rows.put(x, self._columns(labels, weights), places)
        try:
            self._join(ids, labels)
        except Exception:
            self._rows.drop(ids)
            self._rows.next_id -= len(ids)
            raise
        return torch.tensor(ids, dtype=torch.int64)

    @exactly
    def remove(self, ids: Any) -> Self:
        """Unlearn samples by id."""
        found = self._rows.find(ids)
        self._leave(found)
        self._rows.drop(found)
        if not len(self):
            self._clear(0, self._rows.next_id)
        return self

    @exactly
    def relabel(self, ids: Any, y: Any) -> Self:
        """Give samples other labels; machines that do not see the new label lose the sample, others gain it."""
        found = self._rows.find(ids)
        labels = self._labels(y, self._rows.x.new_empty(len(found), 0))
        old = self._labels_of(found)
        self._rows.y[self._rows.index(self._rows.slot_of[i] for i in found), 0] = self._tensor(labels).to(torch.float64)
        for task, machine, names in zip(self.tasks, self.machines, self._names_in, strict=True):
            before, after = ([self._label(task, v) for v in part] for part in (old, labels))
            leaving = [i for i, b, a in zip(found, before, after, strict=True) if b is not None and a is None]
            joining = [(i, a) for i, b, a in zip(found, before, after, strict=True) if b is None and a is not None]
            staying = [(i, a) for i, b, a in zip(found, before, after, strict=True) if b is not None and a is not None]
            if staying:
                machine.relabel([names[i] for i, _ in staying], self._tensor([a for _, a in staying]))  # type: ignore[operator]
            if leaving:
                machine.remove([names.pop(i) for i in leaving])  # type: ignore[operator]
            if joining:
                self._enter(machine, names, [i for i, _ in joining], [a for _, a in joining])
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _clear(self, J: int, next_id: int) -> None:
        self._rows = Rows(J, 2, self._device)  # y: label and weight
        self._rows.next_id = next_id
        self._weighted = False  # whether any sample came with a weight
        self._names_in: list[dict[int, int]] = [{} for _ in self.tasks]  # my id -> the machine's, for each machine

    def _labels(self, y: Any, x: Tensor) -> list[int]:
        labels, kind = checks.targets(y, x, self.num_classes)
        if kind != "labels":
            raise ValueError(f"y must be labels of shape (B,), got float targets of shape {tuple(labels.shape)}")
        host = checks.to_host(labels)
        values = [i % self.num_classes for i in range(len(labels))] if host is None else [int(v) for v in host[0]]
        wrong = [v for v in values if not 0 <= v < self.num_classes]
        if wrong:
            raise ValueError(f"labels must be in 0..{self.num_classes - 1}, got {wrong[0]}")
        return values

    def _tensor(self, labels: list[int]) -> Tensor:
        return torch.tensor(labels, dtype=torch.int64, device=self._device)

    def _columns(self, labels: list[int], weights: Tensor | None) -> Tensor:
        column = self._tensor(labels).to(torch.float64)
        return torch.stack([column, torch.ones_like(column) if weights is None else weights], 1)

    def _labels_of(self, ids: list[int]) -> list[int]:
        column = self._rows.y[self._rows.index(self._rows.slot_of[i] for i in ids), 0]
        host = checks.to_host(column)
        return [i % self.num_classes for i in range(len(ids))] if host is None else [int(v) for v in host[0]]

    def _enter(self, machine: Any, names: dict[int, int], ids: list[int], labels: list[int]) -> None:
        at = self._rows.index(self._rows.slot_of[i] for i in ids)
        more = {"weight": self._rows.y[at, 1]} if self._weighted else {}
        given = machine.add(self._rows.x[at], self._tensor(labels), **more)
        host = checks.to_host(given)
        own = list(range(len(names), len(names) + len(ids))) if host is None else [int(v) for v in host[0]]
        names.update(zip(ids, own, strict=True))

    def _join(self, ids: list[int], labels: list[int]) -> None:
        """Every machine, or none: what was joined is left again when one refuses."""
        done: list[int] = []
        try:
            for t, (task, machine, names) in enumerate(zip(self.tasks, self.machines, self._names_in, strict=True)):
                seen = [(i, a) for i, v in zip(ids, labels, strict=True) if (a := self._label(task, v)) is not None]
                if seen:
                    self._enter(machine, names, [i for i, _ in seen], [a for _, a in seen])
                done.append(t)
        except Exception:
            for t in done:
                self._leave(ids, only=t)
            raise

    def _leave(self, ids: list[int], only: int | None = None) -> None:
        for t, (machine, names) in enumerate(zip(self.machines, self._names_in, strict=True)):
            held = [i for i in ids if i in names] if only in (None, t) else []
            if held:
                machine.remove(torch.tensor([names.pop(i) for i in held], dtype=torch.int64))  # type: ignore[operator]

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; no dtype changes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._device = fn(torch.empty(0, device=self._device)).device
        self._rows.to(self._device)
        return self

    @exactly
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        rows, order = self._rows, self._rows.order()
        # Which name each machine has for each sample, -1 for none: (tasks, n).
        names = [[held.get(i, -1) for i in rows.slot_of] for held in self._names_in]
        options = json.dumps({"form": type(self).__name__, "num_classes": self.num_classes, "next_id": rows.next_id})
        destination |= {
            prefix + "x": rows.x[order].clone(),
            prefix + "y": rows.y[order, 0].to(torch.int64),
            prefix + WEIGHTS: rows.y[order, 1].clone(),
            prefix + "ids": rows.ids,
            prefix + "names": torch.tensor(names, dtype=torch.int64).reshape(len(self.tasks), len(rows)),
            prefix + "options": torch.frombuffer(bytearray(options.encode()), dtype=torch.uint8),
        }

    @exactly
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = {k: state_dict[prefix + k] for k in (*SAVED, WEIGHTS) if prefix + k in state_dict}
        others = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in (*SAVED, WEIGHTS)}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing = [prefix + k for k in SAVED if k not in mine]
        missing_keys += missing
        if missing:
            return
        try:
            options = json.loads(bytes(mine["options"].tolist()).decode())
            if options["form"] != type(self).__name__ or options["num_classes"] != self.num_classes:
                raise ValueError(f"the state is that of {options['form']} with {options['num_classes']} classes")
            ids, x = mine["ids"].tolist(), mine["x"].to(device=self._device, dtype=torch.float64)
            if len(ids) != len(x) or tuple(mine["names"].shape) != (len(self.tasks), len(ids)):
                raise ValueError(f"{len(x)} rows, {len(ids)} ids and names {tuple(mine['names'].shape)} do not fit")
            weights = mine.get(WEIGHTS)
            if weights is not None and tuple(weights.shape) != (len(ids),):
                raise ValueError(f"{len(ids)} ids and weights {tuple(weights.shape)} do not fit")
            weights = None if weights is None else weights.to(device=self._device, dtype=torch.float64)
            self._clear(x.shape[1], int(options["next_id"]))
            self._weighted = self._weighs and weights is not None and bool((weights != 1).any())
            if ids:
                self._rows.grow(len(ids))
                self._rows.put(x, self._columns(mine["y"].tolist(), weights), list(range(len(ids))), ids)
            for held, row in zip(self._names_in, mine["names"].tolist(), strict=True):
                held.update({i: name for i, name in zip(ids, row, strict=True) if name >= 0})
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            error_msgs.append(f"{type(self).__name__}: {error}")

    def extra_repr(self) -> str:
        """Count and classes."""
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
