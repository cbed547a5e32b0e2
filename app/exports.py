"""Results as CSV and Parquet: one row a run, one column a field, units in the column names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from app.fields import COLUMNS, NUMBERS, lookup
from engine.errors import SpecError

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_BOOLEANS = ("spec.compile", "spec.offload_overlap", "fits.fits")


def row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result's COLUMNS; what is a list or an object becomes JSON text."""
    values = {path: lookup(result, path) for path in COLUMNS}
    return {path: json.dumps(value) if isinstance(value, list | dict) else value for path, value in values.items()}


def csv_lines(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """UTF-8 CSV, header first. Text that a spreadsheet would run as a formula gets a leading apostrophe."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    for result in results:
        yield _take(buffer)
        writer.writerow([_harmless(value) for value in row(result).values()])
    yield _take(buffer)


def _take(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def parquet_bytes(results: Iterable[Mapping[str, Any]]) -> bytes:
    """A Parquet file with typed columns. Raises SpecError where pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise SpecError("format", "parquet needs pyarrow: pip install 'remat[parquet]'") from None
    rows = [row(result) for result in results]
    columns = {path: pa.array([values[path] for values in rows], _type(pa, path)) for path in COLUMNS}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _type(pa: Any, path: str) -> Any:
    if path in _BOOLEANS:
        return pa.bool_()
    if path not in NUMBERS:
        return pa.string()
    exact = path.endswith(("_bytes", "_flops", "steps", "parameters")) or path.startswith(("spec.", "memory."))
    return pa.int64() if exact and path not in ("spec.dropout", "spec.memory_limit_gib") else pa.float64()


def encoded(format: str, results: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """The file in pieces: `csv`, `parquet`, or `json` with one result a line."""
    if format == "parquet":
        yield parquet_bytes(results)
    elif format == "csv":
        yield from (line.encode() for line in csv_lines(results))
    else:
        yield from (json.dumps(result).encode() + b"\n" for result in results)
