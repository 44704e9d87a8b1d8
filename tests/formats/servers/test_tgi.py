"""TGI: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

from pathlib import Path

from tests.formats.servers.expected import export, has


def test_medusa_files(tmp_path: Path) -> None:
    for form in ("tgi", "trtllm"):
        config, tensors, out = export(form, "medusa-blocks", tmp_path / form)
        assert has(config, {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "org/model"})
        assert "architectures" not in config and "model_type" not in config
        blocks = {f"{k}.{i}.linear.{what}" for k in (0, 1) for i in (0, 1) for what in ("weight", "bias")}
        assert tensors.keys() == blocks | {"0.2.weight", "1.2.weight"}
        assert (out / "medusa_lm_head.safetensors").is_file()
