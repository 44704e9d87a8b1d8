"""The target: any stock causal language model of transformers, frozen.

No modeling code is copied: forward hooks keep the tapped layers, and explicit 4-D masks with position ids describe a
tree or packed documents.

Legend: B batch, T new tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spechead.errors import UserError
from spechead.target import attention, loading
from spechead.target.adapter import Adapter
from spechead.target.cache import KVCache
from spechead.target.chat_template import ChatTemplate, read_template
from spechead.target.families import (
    decoder_layers,
    decoder_of,
    eos_ids,
    ignored_generation,
    scaled_logits,
    takes_mask_dict,
    with_module,
)
from spechead.target.masks import attention_masks, refuse_unknown_layers
from spechead.target.packed_linear import PackedLinear, can_pack, pack_linears
from spechead.target.switching_rotary import SwitchingRotary, grows_with_length
from spechead.target.taps import Taps


@dataclass
class TargetOutput:
    """The output of one target forward. Rows are positions."""

    hidden: Tensor  # [B, T, H] after the final norm: the input of the output layer
    features: Tensor  # [B, T, taps*H] the tapped layers in the order of the taps, of which there may be none

    def rows(self, index: Tensor) -> TargetOutput:
        """The positions `index` [n] of every batch row, in that order."""
        return TargetOutput(self.hidden[:, index], self.features[:, index])

    def row(self, row: int, length: int | None = None) -> TargetOutput:
        """The batch row `row` only, its first `length` positions."""
        return TargetOutput(self.hidden[row : row + 1, :length], self.features[row : row + 1, :length])


class Target:
    """A frozen causal model with its tokenizer and its chat template.

    `taps` are indices into transformers' `hidden_states`: 0 is the embedding, i the output of decoder layer i - 1, and
    the last index is the state after the final norm.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, name: str, adapter: str = "", chat: ChatTemplate | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.chat = chat or ChatTemplate(tokenizer)
        self.base, self.adapter = name, adapter
        self.config = model.config.get_text_config()
        embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = embedding.shape[0]
        self.n_layers: int = self.config.num_hidden_layers
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.eos_ids = eos_ids(model, tokenizer) | self.chat.stop_ids
        self.ignored_generation = ignored_generation(model)
        self.packed = False
        self.decoder = decoder_of(model)
        self._blocks = decoder_layers(self.decoder, self.n_layers, name)
        self.last_block: nn.Module = self._blocks[-1]  # heads start from its weights, before `pack`
        self._output = model.get_output_embeddings()
        self._output_weight, self._output_bias = self._output.weight, getattr(self._output, "bias", None)
        self._cached_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._cached_layer: tuple[Tensor | None, torch.dtype, nn.Module] | None = None
        parameters = inspect.signature(self.decoder.forward).parameters
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        softcapped = getattr(self.config, "attn_logit_softcapping", None)  # SDPA cannot, our function can
        self._shared_attention = bool(getattr(model, "_supports_sdpa", False) or softcapped)
        model.set_attn_implementation(attention.NAME if self._shared_attention else "eager")
        self._mask_dict = takes_mask_dict(self.decoder)
        self._rotary = SwitchingRotary.of(model, self.decoder, self.config, name)
        refuse_unknown_layers(self.config, name)
        self._check_decoding()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        adapter: str = "",
        dtype: str = "float32",
        device: str = "auto",
        trust_remote_code: bool = False,
        four_bits: bool = False,
        pack: bool = True,
        chat_template: str = "",
        template_kwargs: dict[str, Any] | None = None,
        template_date: str = "",
    ) -> Target:
        """Load `smollm2-135m` (bundled), a local folder or a hub id.

        `adapter`: a peft adapter (folder or hub id) to merge into its weights. `four_bits`: store the weights of linear
        layers in four bits (QLoRA, arXiv 2305.14314) and compute in `dtype`; the fingerprint is still that of the
        original weights. `pack`: for fast decoding on a CPU, see packed_linear.py. `chat_template`, `template_kwargs`
        and `template_date`: see `ChatTemplate`. Raises UserError where the target cannot be loaded, or trees cannot be
        verified with it.
        """
        chosen = loading.choose_device(device)
        if dtype not in loading.DTYPES:
            raise UserError(f"option dtype: {dtype!r} is not one of {', '.join(loading.DTYPES)}")
        model = loading.load_model(name, trust_remote_code=trust_remote_code)
        digest = loading.fingerprint(model)  # of the weights as they are stored
        if adapter:
            digest = loading.merge_adapter(model, adapter, digest, name)
        stored = model
        if four_bits:
            model = loading.load_in_four_bits(name, loading.DTYPES[dtype], chosen, trust_remote_code)
        else:
            for parameter in model.parameters():  # buffers, such as rotary frequencies, keep their precision
                parameter.data = parameter.data.to(chosen, loading.DTYPES[dtype])
            model.to(chosen)
        tokenizer = loading.load_tokenizer(name, adapter, trust_remote_code=trust_remote_code)
        chat = ChatTemplate(tokenizer, read_template(chat_template, tokenizer), template_kwargs or {}, template_date)
        target = cls(model, tokenizer, name, adapter, chat)
        if (warning := target.stop_warning()) and os.environ.get("RANK", "0") == "0":
            print(f"warning: {warning}", file=sys.stderr)
        target.fingerprint = digest
        if four_bits:
            target.last_block = decoder_layers(decoder_of(stored), target.n_layers, name)[-1].to(chosen)
        if pack:
            target.pack()
        return target

    @property
    def name(self) -> str:
        """The name of the model, followed by that of its adapter."""
        return f"{self.base} with {self.adapter}" if self.adapter else self.base

    @property
    def rotary_border(self) -> int | None:
        """The length at which rotary factors switch (longrope), if they do: no tree may reach from within it beyond."""
        return self._rotary.border if self._rotary else None

    def outgrows(self, cached: int, length: int) -> bool:
        """Whether a text of `length` tokens, of which `cached` were read with short rotary factors, is to be read again
        as a whole, as transformers does."""
        return self._rotary is not None and self._rotary.rereads and 0 < cached <= self._rotary.border < length

    def reread(self, cache: KVCache, row: int, ids: Tensor) -> None:
        """Read the text `ids` [n] again as a whole, and put all but its last token into the row of `cache` in place of
        what is there."""
        fresh = KVCache()
        self.forward(ids[None], cache=fresh)
        fresh.crop(ids.shape[0] - 1)
        cache.insert([row], fresh)

    @property
    def positions_text(self) -> str:
        """`256 positions`, for messages, with the reason where other programs go further."""
        text = f"{self.max_positions} positions"
        if not grows_with_length(self.config):
            return text
        return f"{text} (beyond them its dynamic rotary scaling would change those of all cached tokens)"

    def stop_warning(self) -> str:
        """One line where the chat template ends an answer with tokens that the config does not name, else ""."""
        unknown = self.chat.stop_ids - eos_ids(self.model, self.tokenizer)
        if not unknown:
            return ""
        names = ", ".join(f"{self.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in sorted(unknown))
        return (
            f"target {self.name!r}: its chat template ends an answer with {names}, which the eos_token_id of its "
            "config lacks; answers end there, too, and a server needs the same setting"
        )

    def pack(self) -> None:
        """Reorder the weights for fast decoding on a CPU; the weights of the layers cannot be read afterwards."""
        _ = self.fingerprint  # computed from the weights, which packing drops
        if can_pack(self.device, self.dtype) and not self.packed:
            pack_linears(self.model)
            self._output = self.model.get_output_embeddings()
            self.packed = True

    def drafting_dtype(self, name: str) -> str:
        """The name of the dtype that heads and draft models for this target compute in.

        `auto` is bfloat16 where that is fast, else the target's own: drafts are guesses that the target verifies.
        """
        if name != "auto":
            return name
        return "bfloat16" if loading.native_bfloat16(self.device) else loading.dtype_name(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights; independent of the dtype that they were loaded in."""
        return loading.fingerprint(self.model)

    def forward(
        self,
        ids: Tensor,  # [B, T]
        *,
        taps: Sequence[int] = (),
        cache: KVCache | None = None,
        positions: Tensor | None = None,  # [B, T]; default: after the cache, one by one
        visible: Tensor | None = None,  # bool [B, T, T]: which of the new tokens each may see; default: causal
        gradient: bool = False,
    ) -> TargetOutput:
        """Run new tokens after those of the cache, which they all see, inside the sliding window if there is one.

        `gradient`: build the graph, to train an adapter.
        """
        past, lengths = (cache.length, cache.lengths) if cache is not None else (0, None)
        if positions is None:
            first = past if lengths is None else torch.tensor(lengths, device=ids.device)[:, None]  # [B, 1]
            positions = (torch.arange(ids.shape[1], device=ids.device) + first).expand(ids.shape)  # [B, T]
        optional, by_type = self._shared_attention, self._mask_dict
        mask = attention_masks(
            self.config, self.dtype, past, lengths, positions, visible, optional=optional, by_type=by_type
        )
        arguments = {self.cache_keyword: cache, "use_cache": cache is not None}
        tapped = Taps(self._blocks, taps)
        several = ids.shape[0] > 1 or past == 0  # else it is one text, as transformers takes it
        reach = past + ids.shape[1]  # positions are below it
        switching = self._rotary is not None and several and reach > self._rotary.border
        factors = self._rotary.by_document(positions) if self._rotary and switching else nullcontext()
        with torch.set_grad_enabled(gradient), tapped, factors:
            out = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask, **arguments)
        hidden = out.last_hidden_state  # [B, T, H]
        return TargetOutput(hidden, tapped.features(hidden))

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """The output layer on final hidden states [..., H]: float32 [..., V], or only its `rows` [n]: [..., n]."""
        if rows is None:
            return self.scaled(self._output(hidden).float())
        return self.scaled(nn.functional.linear(hidden, *self.output_rows(rows)).float())

    def output_rows(self, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight [n, H] and bias [n] of the output layer for token ids `rows` [n], or all; cached by that tensor."""
        if rows is None:
            return self._output_weight, self._output_bias
        if self._cached_rows is None or self._cached_rows[0] is not rows:
            bias = self._output_bias
            self._cached_rows = (rows, self._output_weight[rows], None if bias is None else bias[rows])
        return self._cached_rows[1], self._cached_rows[2]

    def output_layer(self, rows: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The output layer for token ids `rows` [n], or all, for drafting: in `dtype`, without a gradient.

        Packed if the target is; cached for the same tensor and dtype. `scaled` is applied to its result.
        """
        if rows is None and dtype == self.dtype:
            return self._output
        if self._cached_layer is None or self._cached_layer[0] is not rows or self._cached_layer[1] != dtype:
            weight, bias = self.output_rows(rows)
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
            packed = self.packed and can_pack(self.device, dtype)
            self._cached_layer = rows, dtype, PackedLinear(layer) if packed else layer
        return self._cached_layer[2]

    def check_finite(self, hidden: Tensor, logits: Tensor) -> None:
        """Raise UserError unless all final hidden states and all logits are finite."""
        for values, what in ((hidden, "hidden states after the final norm"), (logits, "logits")):
            if not values.isfinite().all():
                remedy = "its weights are damaged, or do not fit its config"
                if self.dtype == torch.float16:  # whose range is small
                    remedy = "use --dtype bfloat16 or float32"
                raise UserError(
                    f"target {self.name!r} in {loading.dtype_name(self.dtype)} computes {what} that are not finite "
                    f"(infinite or NaN); {remedy}"
                )

    def synchronise(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """The input embeddings of ids as the target computes them, with its scaling: [..., H]."""
        return self.model.get_input_embeddings()(ids)

    def adapt(self, options: dict[str, Any]) -> Adapter:
        """Add a new adapter to the model, to be trained; see `Adapter`. The model must not be packed."""
        return Adapter(self.model, options, self.base)

    def subset(self, layers: Sequence[int]) -> Target:
        """A target of these decoder layers only (from 0, ascending), between the same embeddings and output layer.

        It shares modules and weights with this one; pack the target before, not after. In a cache, skipped layers
        contain no tokens. Raises UserError where there are no such layers.
        """
        chosen = sorted(set(layers))
        if not chosen or list(layers) != chosen or chosen[0] < 0 or chosen[-1] >= self.n_layers:
            raise UserError(
                f"layers {list(layers)} of {self.name!r}: must be ascending numbers from 0 to {self.n_layers - 1}"
            )
        config = copy.deepcopy(self.config)
        kinds = getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = [kinds[layer] for layer in chosen]
        config.num_hidden_layers = len(chosen)
        blocks = nn.ModuleList([self._blocks[layer] for layer in chosen])
        decoder = with_module(self.decoder, self._blocks, blocks)
        decoder.config = config
        twin = copy.copy(self)
        twin.config, twin.n_layers, twin._blocks, twin.decoder = config, len(chosen), blocks, decoder
        twin.model = with_module(self.model, self.decoder, decoder)
        if self.model.config is self.config:
            twin.model.config = config
        return twin

    def norm_weight(self, norm: nn.Module | None) -> Tensor | None:
        """The weight [H] that an RMSNorm multiplies by (Gemma stores it minus one); None for other norms."""
        if norm is None or "RMSNorm" not in type(norm).__name__:
            return None
        return norm(torch.ones(1, self.hidden_size, device=self.device, dtype=torch.float32))[0].float()

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last layer and the output layer."""
        norms = [module for module in self.decoder.children() if "Norm" in type(module).__name__]
        return norms[-1] if norms else None

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits as the family scales them after the output layer."""
        return scaled_logits(self.config, logits)

    @torch.no_grad()
    def _check_decoding(self) -> None:
        """A tree of three nodes, two continuations of one token, must give the model's own logits of each sequence."""
        a, b, c = (token % self.vocab_size for token in (1, 2, 3))
        whole = self.model(input_ids=torch.tensor([[a, b], [a, c]], device=self.device), use_cache=False).logits.float()
        tree = torch.tensor([[a, b, c]], device=self.device)
        visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=self.device)
        positions = torch.tensor([[0, 1, 1]], device=self.device)
        try:
            hidden = self.forward(tree, positions=positions, visible=visible).hidden[0]  # [3, H]
            ours = self.logits(hidden)  # [3, V]
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._unfit("does not accept explicit positions and masks, which trees and batches need") from error
        self.check_finite(hidden, ours)
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1

        def same(node: int, row: int, place: int) -> bool:
            return torch.allclose(ours[node], whole[row, place], rtol=tolerance, atol=tolerance)

        if not same(0, 0, 0):
            raise self._unfit("changes its logits after the output layer in a way that spechead does not know")
        if not (same(1, 0, 1) and same(2, 1, 1)):
            raise self._unfit("does not follow explicit positions and masks, which trees and batches need")

    def _unfit(self, why: str) -> UserError:
        return UserError(f"target {self.name!r} ({self.config.model_type}) {why}; it cannot be used")
