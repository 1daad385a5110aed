"""Raw clients: the KV of a prompt out of a prefill worker, into a decode worker, or into a file.

``docs/clients.md`` shows them at work.
"""

from kvproto.client.blocking import (
    BlockingDecodeClient,
    BlockingGeneration,
    BlockingPrefillClient,
)
from kvproto.client.decode_client import DecodeClient, Generation
from kvproto.client.prefill_client import LandedRows, PrefillClient
from kvproto.convert import bfloat16_to_float32
from kvproto.kv_cache import KvCache
from kvproto.kv_file import KvFile, KvFileWriter, save_kv

__all__ = [
    "BlockingDecodeClient",
    "BlockingGeneration",
    "BlockingPrefillClient",
    "DecodeClient",
    "Generation",
    "KvCache",
    "KvFile",
    "KvFileWriter",
    "LandedRows",
    "PrefillClient",
    "bfloat16_to_float32",
    "save_kv",
]
