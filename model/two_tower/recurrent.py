"""States of recurrent layers (Mamba-2, linear attention, short convolution): seeding them, and cutting them at blocks.

transformers hands a recurrent layer its state through the `Cache` of the forward. `StateCache` is one that starts from
given states and never changes them: what a layer would store goes to `after`, beside. So the denoiser can start a block
as often as it likes from what the context tower left, and a commit that is not accepted leaves nothing behind.
Attention layers share the cache object; their keys and values pass through it, since attention plans hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin


@dataclass(frozen=True)
class LayerState:
    """A recurrent layer's state of R rows. conv: the last K inputs of its convolution, [R, C, K].

    recurrent: [R, ...], None in a layer that only convolves.
    """

    conv: Tensor
    recurrent: Tensor | None

    def rows(self, index: Tensor) -> LayerState:
        """The states of some rows, int64 [M]."""
        recurrent = None if self.recurrent is None else self.recurrent[index]
        return LayerState(self.conv[index], recurrent)

    def to(self, device: torch.device) -> LayerState:
        return LayerState(self.conv.to(device), None if self.recurrent is None else self.recurrent.to(device))


States = dict[int, LayerState]  # by layer; empty: nothing read yet, or a model without recurrent layers


def join_states(states: Sequence[States]) -> States:
    """Rows of several, one after the other. All must hold the same layers."""
    joined: States = {}
    for layer in states[0] if states else ():
        of_layer = [state[layer] for state in states]
        recurrent = [s.recurrent for s in of_layer if s.recurrent is not None]
        joined[layer] = LayerState(torch.cat([s.conv for s in of_layer]), torch.cat(recurrent) if recurrent else None)
    return joined


class _StateLayer(LinearAttentionCacheLayerMixin):
    """One layer of `StateCache`."""

    def __init__(self, seed: LayerState | None, one_token: bool) -> None:
        super().__init__()
        self.record_past = True  # a single token, too, then takes its convolution from `update_conv_state`
        self.has_previous_state = {0: seed is not None}
        self.conv_states = {0: None if seed is None else seed.conv}
        recurrent = None if seed is None else seed.recurrent
        # The step for a single token updates the recurrent state in place.
        self.recurrent_states = {0: recurrent.clone() if recurrent is not None and one_token else recurrent}
        self.conv_inputs: Tensor | None = None
        self.kernel = 0
        self.final: Tensor | None = None

    def lazy_initialization(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return key, value

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: object
    ) -> Tensor:
        """conv_states [R, C, n]: the new inputs. Returns [R, C, K + n], the old ones first."""
        assert state_idx == 0, "a layer with several recurrent states is not supported"
        seed = self.conv_states[0]
        self.kernel = conv_kernel_size
        if seed is None:
            seed = conv_states.new_zeros((*conv_states.shape[:-1], conv_kernel_size))
        self.conv_inputs = torch.cat((seed, conv_states), dim=-1)
        return self.conv_inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        assert state_idx == 0, "a layer with several recurrent states is not supported"
        self.final = recurrent_states
        return recurrent_states


class StateCache(Cache):
    """A cache for one forward of R rows: recurrent layers start from `seeds`, where they have one; nothing is written.

    layers: number of decoder layers. one_token: whether the forward is of one token a row.
    """

    def __init__(self, layers: int, seeds: States, *, one_token: bool) -> None:
        super().__init__(layers=[_StateLayer(seeds.get(layer), one_token) for layer in range(layers)])

    def after(self) -> States:
        """The states behind the forward's last token, detached."""
        states: States = {}
        for index, layer in enumerate(self.layers):
            if layer.conv_inputs is not None:
                final = layer.recurrent_states[0] if layer.final is None else layer.final
                conv = layer.conv_inputs[..., -layer.kernel :].detach()
                states[index] = LayerState(conv, None if final is None else final.detach())
        return states

    def conv_inputs(self, layer: int) -> Tensor:
        """All inputs [R, C, K + n] of a layer's convolution, the seed's K first."""
        inputs = self.layers[layer].conv_inputs
        assert inputs is not None, f"layer {layer} has not run"
        return inputs.detach()

    def final(self, layer: int) -> Tensor | None:
        """A layer's recurrent state behind the last token."""
        final: Tensor | None = self.layers[layer].final
        return final

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Never asked for anything that counts: positions are always given."""
        return 0
