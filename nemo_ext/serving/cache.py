"""Layer of transformers' cache with preallocated room for new tokens."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

_ROOM = 64
"""Number of tokens by which a layer grows."""


class RoomyLayer(DynamicLayer):
    """Keys and values `[rows, heads, tokens, size]` with free room at the end, so that new tokens copy no old ones."""

    keys: Tensor
    values: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rooms: dict[str, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._added("keys", self.keys, key_states)
        self.values = self._added("values", self.values, value_states)
        return self.keys, self.values

    def _added(self, name: str, before: Tensor, new: Tensor) -> Tensor:
        if not before.numel():
            return new
        start, end = before.shape[-2], before.shape[-2] + new.shape[-2]
        room, seen = self._rooms.get(name, (before, None))
        if seen is not before or end > room.shape[-2]:  # rows were added or removed since, or the room is full
            room = before.new_empty(*before.shape[:-2], end + _ROOM, before.shape[-1])
            room[..., :start, :] = before
        room[..., start:end, :] = new
        whole = room[..., :end, :]
        self._rooms[name] = (room, whole)
        return whole
