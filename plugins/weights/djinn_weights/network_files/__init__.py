"""Weight sources on networks: `https:`, and `s3:` and `gs:` if s3fs and gcsfs are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from djinn.hooks import WeightSource, hookimpl
from djinn_weights.network_files.buckets import BucketSource
from djinn_weights.network_files.https import HttpsSource

djinn_api_version = "2.0"

__all__ = ["BucketSource", "HttpsSource"]

# Timeouts in seconds, as options of botocore.
_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 4}}


@hookimpl
def djinn_register_weight_sources() -> Iterable[WeightSource]:
    """Return the weight sources `https:`, `s3:` and `gs:`."""
    sources: list[WeightSource] = [HttpsSource()]
    if find_spec("s3fs") is not None:
        sources.append(BucketSource("s3", config_kwargs=_S3_TIMEOUTS))
    if find_spec("gcsfs") is not None:
        sources.append(BucketSource("gs", requests_timeout=60))
    return sources
