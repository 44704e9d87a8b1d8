"""The target: any stock causal language model of transformers, frozen.

It gives hidden states, tapped features and logits. The one file that loads transformers models. No modeling code is
copied: forward hooks keep the tapped layers, and an explicit 4-D mask with position ids describes a tree or packed
documents. Knows nothing of heads, drafts or training.

Legend: B batch, T new tokens, P tokens in the cache, H hidden size, K tapped layers, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spechead.errors import UserError
from spechead.target import attention
from spechead.target.adapter import Adapter
from spechead.target.cache import KVCache
from spechead.target.loading import (
    DTYPES,
    choose_device,
    dtype_name,
    fingerprint,
    load_in_four_bits,
    load_model,
    load_tokenizer,
    merge_adapter,
    native_bfloat16,
)
from spechead.target.packed_linear import PackedLinear, can_pack, pack_linears
from spechead.target.taps import Taps


@dataclass
class TargetOutput:
    """What one target forward leaves for others. Rows are positions."""

    hidden: Tensor  # [B, T, H] after the final norm: what the output layer reads
    features: Tensor  # [B, T, K*H] the tapped layers side by side, lowest first; K may be 0

    def rows(self, index: Tensor) -> TargetOutput:
        """The positions `index` [n] of every batch row, in that order."""
        return TargetOutput(self.hidden[:, index], self.features[:, index])

    def row(self, row: int, length: int | None = None) -> TargetOutput:
        """The batch row `row` alone, its first `length` positions."""
        return TargetOutput(self.hidden[row : row + 1, :length], self.features[row : row + 1, :length])


class Target:
    """A frozen causal model with its tokenizer.

    `taps` are indices into transformers' `hidden_states`: 0 is the embedding, i the output of decoder layer i - 1, and
    the last index is the state after the final norm.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str, adapter: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.base, self.adapter = name, adapter
        self.config = model.config.get_text_config()
        embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = embedding.shape[0]
        self.n_layers: int = self.config.num_hidden_layers
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.eos_ids = _eos_ids(model, tokenizer)
        self.packed = False
        self.decoder = _decoder(model)
        self._blocks = _blocks(self.decoder, self.n_layers, name)
        self.last_block: nn.Module = self._blocks[-1]  # heads start from its weights, before `pack`
        self._output = model.get_output_embeddings()
        self._output_weight, self._output_bias = self._output.weight, getattr(self._output, "bias", None)
        self._held_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._held_layer: tuple[Tensor | None, torch.dtype, nn.Module] | None = None
        parameters = inspect.signature(self.decoder.forward).parameters
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        softcapped = getattr(self.config, "attn_logit_softcapping", None)  # SDPA cannot, our function can
        self._shared_attention = bool(getattr(model, "_supports_sdpa", False) or softcapped)
        model.set_attn_implementation(attention.NAME if self._shared_attention else "eager")
        self._refuse_unknown_layers()
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
    ) -> Target:
        """Load `smollm2-135m` (bundled), a local folder or a hub id.

        `adapter`: a peft adapter (folder or hub id) to merge into its weights. `four_bits`: hold the weights of linear
        layers so (QLoRA, arXiv 2305.14314), computing in `dtype`; the fingerprint stays that of the stored weights.
        `pack`: for decoding on a CPU, see packed.py.
        """
        chosen = choose_device(device)
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        model = load_model(name, trust_remote_code=trust_remote_code)
        digest = fingerprint(model)  # of the weights as they are stored
        if adapter:
            digest = merge_adapter(model, adapter, digest, name)
        stored = model
        if four_bits:
            model = load_in_four_bits(name, DTYPES[dtype], chosen, trust_remote_code)
        else:
            for parameter in model.parameters():  # buffers, such as rotary frequencies, keep their precision
                parameter.data = parameter.data.to(chosen, DTYPES[dtype])
            model.to(chosen)
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        target = cls(model, tokenizer, name, adapter)
        target.fingerprint = digest
        if four_bits:
            target.last_block = _blocks(_decoder(stored), target.n_layers, name)[-1].to(chosen)
        if pack:
            target.pack()
        return target

    @property
    def name(self) -> str:
        """What to call it: its own name, and that of the adapter it carries."""
        return f"{self.base} with {self.adapter}" if self.adapter else self.base

    def pack(self) -> None:
        """Reorder the weights for fast decoding on a CPU; after it the layers' own weights cannot be read."""
        _ = self.fingerprint  # packing gives up the weights
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
        return "bfloat16" if native_bfloat16(self.device) else dtype_name(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Which weights these are; the same in whatever dtype `load` was asked for them."""
        return fingerprint(self.model)

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
        """Run new tokens behind those of the cache, all of which they see.

        Where there is a sliding window, they see those inside it. `gradient`: for the training of an adapter.
        """
        past, lengths = (cache.length, cache.lengths) if cache is not None else (0, None)
        if positions is None:
            first = past if lengths is None else torch.tensor(lengths, device=ids.device)[:, None]  # [B, 1]
            positions = (torch.arange(ids.shape[1], device=ids.device) + first).expand(ids.shape)  # [B, T]
        arguments = {self.cache_keyword: cache, "use_cache": cache is not None}
        tapped = Taps(self._blocks, taps)
        with torch.set_grad_enabled(gradient), tapped:
            out = self.decoder(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._masks(past, lengths, positions, visible),
                **arguments,
            )
        hidden = out.last_hidden_state  # [B, T, H]
        return TargetOutput(hidden, tapped.features(hidden))

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """The output layer on final hidden states [..., H]: float32 [..., V], or only its `rows` [n]: [..., n]."""
        if rows is None:
            return self.scaled(self._output(hidden).float())
        return self.scaled(nn.functional.linear(hidden, *self.output_rows(rows)).float())

    def output_rows(self, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight [n, H] and bias [n] of the output layer for token ids `rows` [n], or all; kept for the same tensor."""
        if rows is None:
            return self._output_weight, self._output_bias
        if self._held_rows is None or self._held_rows[0] is not rows:
            bias = self._output_bias
            self._held_rows = (rows, self._output_weight[rows], None if bias is None else bias[rows])
        return self._held_rows[1], self._held_rows[2]

    def output_layer(self, rows: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The output layer over token ids `rows` [n], or all, as drafts read it: in their `dtype`, without a gradient.

        Packed where the target is; kept for the same tensor and dtype. `scaled` comes behind it.
        """
        if rows is None and dtype == self.dtype:
            return self._output
        if self._held_layer is None or self._held_layer[0] is not rows or self._held_layer[1] != dtype:
            weight, bias = self.output_rows(rows)
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
            packed = self.packed and can_pack(self.device, dtype)
            self._held_layer = rows, dtype, PackedLinear(layer) if packed else layer
        return self._held_layer[2]

    def synchronise(self) -> None:
        """Wait until the device has done all that it was told to; then a clock may be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """The input embeddings of ids, exactly as the target forms them (scaled where it scales): [..., H]."""
        return self.model.get_input_embeddings()(ids)

    def adapt(self, options: dict[str, Any]) -> Adapter:
        """Put a new adapter into the model, to be trained; see `Adapter`. The model must not be packed."""
        return Adapter(self.model, options, self.base)

    def subset(self, layers: Sequence[int]) -> Target:
        """A target of these decoder layers alone (from 0, ascending), between the same embeddings and output layer.

        It shares modules and weights with this one; a target that is to be packed is packed before. In a cache, the
        layers left out hold no tokens. Raises UserError where there are no such layers.
        """
        chosen = sorted(set(layers))
        if not chosen or list(layers) != chosen or chosen[0] < 0 or chosen[-1] >= self.n_layers:
            raise UserError(
                f"layers {list(layers)} of target {self.name!r}: needs ascending numbers from 0 to {self.n_layers - 1}"
            )
        config = copy.deepcopy(self.config)
        kinds = getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = [kinds[layer] for layer in chosen]
        config.num_hidden_layers = len(chosen)
        blocks = nn.ModuleList([self._blocks[layer] for layer in chosen])
        decoder = _with_module(self.decoder, self._blocks, blocks)
        decoder.config = config
        twin = copy.copy(self)
        twin.config, twin.n_layers, twin._blocks, twin.decoder = config, len(chosen), blocks, decoder
        twin.model = _with_module(self.model, self.decoder, decoder)
        if self.model.config is self.config:
            twin.model.config = config
        return twin

    @property
    def rope_theta(self) -> float:
        """The base of the target's rotary positions (of its full-attention layers, where there are two kinds)."""
        return float(self._rope.get("rope_theta") or getattr(self.config, "rope_theta", None) or 10000.0)

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """How the target scales its rotary positions, in transformers' words; empty where it does not.

        Factors of single dimensions (longrope) of a target that rotates only some are left out: they fit no others.
        """
        kind = self._rope.get("rope_type", "default")
        partial = self._rope.get("partial_rotary_factor", 1.0) != 1.0
        if kind in ("default", "proportional") or (kind == "longrope" and partial):
            return {}
        return {k: v for k, v in self._rope.items() if k not in ("rope_theta", "partial_rotary_factor", "type")}

    def rotary_frequencies(self, size: int, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
        """Inverse frequencies [size/2], float32, and the factor on cosine and sine, of a scaling of base `theta`.

        For texts within the original length: what dynamic scalings and longrope do beyond it is not followed. Raises
        UserError where transformers knows no such scaling, or it does not fit heads of `size`.
        """
        config = copy.deepcopy(self.config)
        config.head_dim = size
        config.rope_parameters = {**scaling, "rope_theta": theta, "partial_rotary_factor": 1.0}
        try:
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if scaling.get("rope_type") not in ROPE_INIT_FUNCTIONS:
                raise UserError(
                    f"head.options.rope_scaling {scaling}: needs a rope_type, one of {', '.join(ROPE_INIT_FUNCTIONS)}"
                ) from error
            raise UserError(
                f"head.options.rope_scaling {scaling} does not fit heads of size {size} ({type(error).__name__}: "
                f"{error}); give head.options.rope_theta for positions without scaling"
            ) from error
        return frequencies.float(), float(factor)

    @property
    def _rope(self) -> dict[str, Any]:
        """What the config says of rotary positions (of full-attention layers, where there are two kinds)."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        return dict(rope.get("full_attention", rope))

    def norm_weight(self, norm: nn.Module | None) -> Tensor | None:
        """The weight [H] that an RMSNorm in effect multiplies by (Gemma stores it less one); None for other norms."""
        if norm is None or "RMSNorm" not in type(norm).__name__:
            return None
        return norm(torch.ones(1, self.hidden_size, device=self.device, dtype=torch.float32))[0].float()

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last layer and the output layer."""
        norms = [module for module in self.decoder.children() if "Norm" in type(module).__name__]
        return norms[-1] if norms else None

    def scaled(self, logits: Tensor) -> Tensor:
        """What some families do to logits behind the output layer; `_check_decoding` proves it complete."""
        if getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * self.config.logit_scale
        if getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / self.config.logits_scaling
        cap = getattr(self.config, "final_logit_softcapping", None)  # Gemma
        return torch.tanh(logits / cap) * cap if cap else logits

    def _refuse_unknown_layers(self) -> None:
        """Masks and cache are right for full and for sliding attention alone."""
        unknown = set(getattr(self.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UserError(
                f"target {self.name!r} ({self.config.model_type}) has layers of type {', '.join(sorted(unknown))}; "
                "only full and sliding attention can be verified in a tree"
            )

    @torch.no_grad()
    def _check_decoding(self) -> None:
        """Two continuations of one token, as a tree of three nodes, must give what the model itself says of each."""
        a, b, c = (token % self.vocab_size for token in (1, 2, 3))
        whole = self.model(input_ids=torch.tensor([[a, b], [a, c]], device=self.device), use_cache=False).logits.float()
        tree = torch.tensor([[a, b, c]], device=self.device)
        visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=self.device)
        positions = torch.tensor([[0, 1, 1]], device=self.device)
        try:
            ours = self.logits(self.forward(tree, positions=positions, visible=visible).hidden)[0]  # [3, V]
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._unfit("does not take explicit positions and masks, which trees and batches need") from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1

        def same(node: int, row: int, place: int) -> bool:
            return torch.allclose(ours[node], whole[row, place], rtol=tolerance, atol=tolerance)

        if not same(0, 0, 0):
            raise self._unfit("changes its logits behind the output layer in a way that spechead does not know")
        if not (same(1, 0, 1) and same(2, 1, 1)):
            raise self._unfit("does not follow explicit positions and masks, which trees and batches need")

    def _unfit(self, why: str) -> UserError:
        return UserError(f"target {self.name!r} ({self.config.model_type}) {why}; it cannot be used")

    def _masks(self, past: int, lengths: list[int] | None, positions: Tensor, visible: Tensor | None) -> Any:
        """The 4-D mask(s) [B, 1, T, P+T]: what the cache holds of each row and the `visible` new tokens, cut by the
        window of sliding layers.

        None where our attention function needs none: one new token, or a plain causal prefill, without a window in
        reach.
        """
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        batch, new = positions.shape
        in_reach = window is not None and past + new > window  # no position lies behind past + new - 1
        plain = self._shared_attention and visible is None and lengths is None and (past == 0 or new == 1)
        if plain and not in_reach:
            return {kind: None for kind in kinds} if self._takes_mask_dict and kinds else None
        if visible is None:
            visible = torch.ones(new, new, dtype=torch.bool, device=positions.device).tril()[None]
        allowed = visible.expand(batch, new, new)
        columns = torch.arange(past, device=positions.device)  # [P]; a token's column is its place in the text
        held = columns < past  # [P]
        if lengths is not None:
            held = columns < torch.tensor(lengths, device=positions.device)[:, None, None]  # [B, 1, P]
        allowed = torch.cat([held.expand(batch, new, past), allowed], -1)  # [B, T, P+T]
        full = None if plain else self._additive(allowed)
        if not kinds:
            kinds = {"sliding_attention"} if window is not None else {"full_attention"}
        masks: dict[str, Any] = {"full_attention": full, "sliding_attention": full}
        if window is not None and in_reach and "sliding_attention" in kinds:
            keys = torch.cat([columns.expand(batch, past), positions], -1)  # [B, P+T]
            near = positions[:, :, None] - keys[:, None, :] < window  # [B, T, P+T]
            masks["sliding_attention"] = self._additive(allowed & near)
        if getattr(self.config, "layer_types", None) and self._takes_mask_dict:
            return {kind: masks.get(kind, full) for kind in kinds}
        return masks["sliding_attention" if "sliding_attention" in kinds else "full_attention"]

    def _additive(self, allowed: Tensor) -> Tensor:
        blocked = torch.finfo(self.dtype).min
        return torch.zeros_like(allowed, dtype=self.dtype).masked_fill_(~allowed, blocked)[:, None]

    @cached_property
    def _takes_mask_dict(self) -> bool:
        """Whether the family picks a mask per layer type out of a dict (those with `layer_types` that mix windows)."""
        return "causal_mask_mapping" in inspect.getsource(type(self.decoder).forward)


def _decoder(model: PreTrainedModel) -> nn.Module:
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def _blocks(decoder: nn.Module, n_layers: int, name: str) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise UserError(f"target {name!r}: no list of {n_layers} decoder layers in {type(decoder).__name__}")


def _with_module(module: Any, old: nn.Module, new: nn.Module) -> Any:
    """A copy of `module` that holds `new` for `old`, wherever in it, and shares all the rest."""
    twin = copy.copy(module)
    inside = {name: child for name, child in module.named_children() if any(part is old for part in child.modules())}
    swapped = {name: new if child is old else _with_module(child, old, new) for name, child in inside.items()}
    twin._modules = {**module._modules, **swapped}
    return twin


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's, else the config's and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), getattr(model.config, "eos_token_id", None)):
        if ids is not None and not found:
            found.update([ids] if isinstance(ids, int) else ids)
    if getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
