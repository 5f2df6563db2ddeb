"""NVIDIA ModelOpt: FP8 and NVFP4, from config.json or the older hf_quant_config.json."""

from __future__ import annotations

from model.config_fields import Fields
from model.weights.formats import patterns
from model.weights.formats.fp4 import Nvfp4Scheme
from model.weights.formats.fp8 import Fp8Scheme
from model.weights.formats.quantisation import Quantisation
from model.weights.formats.stored_matrix import Scheme

SCHEMES: dict[str, Scheme] = {
    "FP8": Fp8Scheme(quantised_input=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(quantised_input=True),
    "NVFP4": Nvfp4Scheme(),
}


def read_modelopt(fields: Fields) -> Quantisation:
    """Read `quant_method: "modelopt"`. Raises ModelError."""
    algorithm = fields.text("quant_algo")
    if algorithm not in SCHEMES:
        raise fields.error("quant_algo", f"{algorithm!r} is not supported ({', '.join(SCHEMES)})")
    if algorithm == "NVFP4" and fields.integer("group_size", 16, high=1 << 20) != 16:
        raise fields.error("group_size", "NVFP4 has groups of 16")
    skip_field = "exclude_modules" if fields.get("exclude_modules") is not None else "ignore"
    is_skipped = patterns.wildcards(patterns.entries(fields, skip_field))
    return Quantisation(
        label=f"ModelOpt {algorithm}",
        source=fields.source,
        skip_field=skip_field,
        scheme_of=lambda module: None if is_skipped(module) else SCHEMES[algorithm],
    )
