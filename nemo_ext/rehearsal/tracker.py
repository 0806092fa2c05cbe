"""Measures one rank on fake tensors, operation by operation: live bytes, FLOPs and collectives."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

HOST = "host"
"""Kind of tensors in host memory, which are not counted."""
SCALAR = torch.ops.aten._local_scalar_dense.default


class Tracker(TorchDispatchMode):
    """Dispatch mode, entered inside FakeTensorMode, that follows every storage from its allocation to its release.

    Attributes:
        phase: name of the current phase.
        kind: kind assigned to new storages for their lifetime: weights, gradients, optimizer, activations, temporary.
        live: live bytes, keyed by kind.
        peak: bytes, keyed by kind, when their sum was highest since `forget_peak`.
        peak_phase: phase at that time.
        flops: FLOPs, keyed by phase, of matrix products and of kernels that report theirs with `add_flops`.
        collectives: mapping from (phase, group, operation) to [count, bytes]; a call counts as many bytes as its
            largest tensor has.
        curve: memory over time, as triples (number of operations so far, phase, live bytes) at each change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.kind = "setup", "optimizer"
        self.live: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_phase = ""
        self.flops: Counter[str] = Counter()
        self.collectives: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self.curve: list[tuple[int, str, int]] = []
        self.operations = 0
        self._storages: dict[int, tuple[str, int]] = {}
        self._highest = -1
        self._stopped = False

    @contextmanager
    def during(self, phase: str, kind: str) -> Iterator[None]:
        """Context manager that sets the attributes `phase` and `kind`, and restores them at the end."""
        before = self.phase, self.kind
        self.phase, self.kind = phase, kind
        try:
            yield
        finally:
            self.phase, self.kind = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        if func is SCALAR:
            # A known flag of this rank, which is assumed to be the same on all ranks.
            if (known := getattr(args[0], "constant", None)) is not None:
                return known.item()
            # A fake tensor has no value (gradient norm, token count); 1 is valid everywhere.
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs)
        if self._stopped:
            return out
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops[self.phase] += count(*args, **kwargs, out_val=out)
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor)
        return out

    def label(self, tensors: Any, kind: str) -> None:
        """Change the kind of the given tensors' storages."""
        for tensor in tensors:
            key = self._follow(tensor)
            old, size = self._storages[key]
            self._storages[key] = (kind, size)
            self.live[old] -= size
            self.live[kind] += size

    def forget_peak(self) -> None:
        """Reset peak, curve, FLOPs and collectives; live storages remain."""
        self._highest = -1
        self.flops.clear()
        self.collectives.clear()
        self.curve.clear()
        self.operations = 0

    def stop(self) -> None:
        """Stop recording; later operations are not counted."""
        self._stopped = True

    def add_flops(self, flops: float) -> None:
        """Add the FLOPs of a kernel that torch sees as one operation."""
        self.flops[self.phase] += round(flops)

    def add_collective(self, group: str, operation: str, count: int, size: int) -> None:
        """Add the communication of a kernel that torch sees as one operation.

        Args:
            group: name of the process group.
            operation: name of the collective, such as `allgather_base`.
            count: number of calls.
            size: bytes of all calls together.
        """
        if self._stopped:
            return
        counted = self.collectives[self.phase, group, operation]
        counted[0] += count
        counted[1] += size

    def _follow(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            self._storages[key] = (self.kind, size)
            weakref.finalize(storage, self._end, key)
            self._change(self.kind, size)
        elif known[1] != size:
            self._storages[key] = (known[0], size)
            self._change(known[0], size - known[1])
        return key

    def _end(self, key: int) -> None:
        kind, size = self._storages.pop(key)
        self._change(kind, -size)

    def _change(self, kind: str, size: int) -> None:
        if self._stopped:
            return
        self.live[kind] += size
        total = self.live.total() - self.live[HOST]
        self.curve.append((self.operations, self.phase, total))
        if total > self._highest:
            self._highest, self.peak_phase = total, self.phase
            self.peak = {each: size for each, size in self.live.items() if each != HOST}

    def _collective(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Count the bytes of the collective `func`, and run it on empty tensors: torch has no fake kernels for some."""
        objects = [each for each in tree_iter(args) if isinstance(each, torch.ScriptObject)]
        groups = [each for each in objects if "ProcessGroup" in str(each._type())]
        name = torch.distributed.ProcessGroup.unbox(groups[0]).group_desc if groups else "unknown"
        sizes = [each.nbytes for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.add_collective(name, func._overloadpacket.__name__.strip("_"), 1, max(sizes, default=0))
        # Without split sizes, which do not fit empty tensors.
        args = [[] if isinstance(each, list) and all(isinstance(n, int) for n in each) else each for each in args]
        with unset_fake_temporarily():
            return func(*tree_map_only(torch.Tensor, _empty, args), **tree_map_only(torch.Tensor, _empty, dict(kwargs)))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype)
