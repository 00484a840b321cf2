"""Packed rows on disk: their schema."""

from __future__ import annotations

import pyarrow as pa

COLUMNS = ("input_ids", "labels", "document_ids", "position_ids")
ROW_SCHEMA = pa.schema([pa.field(name, pa.list_(pa.int32()), nullable=False) for name in COLUMNS])
