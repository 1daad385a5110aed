"""What a KV file says about itself, as lines for people and as plain data for programs."""

from itertools import groupby
from typing import Any

from kvproto.geometry import PER_TOKEN, KvGeometry, Layer
from kvproto.kv_file import KvFile
from ops.byte_progress import megabytes


def kv_file_lines(file: KvFile) -> list[str]:
    """One fact a line, then one line for each run of layers of one shape."""
    cache, geometry = file.cache, file.cache.geometry
    error = f"{cache.wire_error:.3%} relative RMS" if cache.wire_error else "nothing"
    rows = [
        ("file", f"{file.path}, {megabytes(file.nbytes)}, {file.order.name.lower()}-endian"),
        ("model", cache.model or "-"),
        ("tokens", f"{cache.num_tokens}, and {len(cache.next_tokens)} behind them without KV"),
        ("dtype", geometry.dtype),
        ("lost", error),
        ("layers", str(geometry.num_layers)),
        *_layer_rows(file),
        *sorted((name, str(value)) for name, value in cache.facts.items()),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name:<{width}}{value}" for name, value in rows]


def kv_file_facts(file: KvFile) -> dict[str, Any]:
    """The same and more as JSON data: every layer, every token, every digest."""
    cache, geometry = file.cache, file.cache.geometry
    spans, digests = cache.layout.spans(), iter(file.head.digests)
    return {
        "path": str(file.path),
        "nbytes": file.nbytes,
        "format_version": file.head.format_version,
        "byte_order": file.order.name.lower(),
        "model": cache.model,
        "dtype": geometry.dtype,
        "wire_error": cache.wire_error,
        "num_tokens": cache.num_tokens,
        "tokens": list(cache.tokens),
        "next_tokens": list(cache.next_tokens),
        "facts": dict(cache.facts),
        "layers": [
            {
                "name": layer.name,
                "window_tokens": layer.window_tokens,
                "first_token": cache.first_token(layer.name),
                "regions": [
                    {
                        "name": region.name,
                        "per": region.per,
                        "num_heads": region.num_heads,
                        "head_dim": region.head_dim,
                        "nbytes": next(spans)[1],
                        "digest": f"{next(digests):016x}",
                    }
                    for region in layer.regions
                ],
            }
            for layer in geometry.layers
        ],
    }


def _layer_rows(file: KvFile) -> list[tuple[str, str]]:
    cache, geometry = file.cache, file.cache.geometry
    rows: list[tuple[str, str]] = []
    for _, run in groupby(enumerate(geometry.layers), key=lambda item: _shape(item[1])):
        layers = list(run)
        (index, first), (_, last) = layers[0], layers[-1]
        names = first.name if first is last else f"{first.name} .. {last.name}"
        num_tokens = cache.num_tokens - cache.layout.first_token(index)
        regions = ", ".join(_region_texts(geometry, index, num_tokens))
        window = f", window {first.window_tokens}" if first.window_tokens else ""
        nbytes = geometry.write_nbytes(index, num_tokens, is_last=True)
        rows.append(("", f"{names}: {regions}{window}; {megabytes(nbytes)} each"))
    return rows


def _region_texts(geometry: KvGeometry, layer: int, num_tokens: int) -> list[str]:
    return [
        f"{region.name} [{num_tokens if region.per == PER_TOKEN else 1}, {region.num_heads}, "
        f"{region.head_dim}]"
        for region in geometry.layers[layer].regions
    ]


def _shape(layer: Layer) -> tuple[object, ...]:
    return (layer.regions, layer.window_tokens)
