"""The benchmarks of lanes decode what they time, one by one and side by side."""

import pytest

from underpar.core.runtime import Runtime
from underpar.lab import benches


@pytest.mark.parametrize("name", ["lanes", "exact_lanes"])
def test_both_sides_decode_the_documents(
    name: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "_MADE_UP_TOKENS", 32 * 8 + 32)
    bench = benches.find_bench(name, runtime)
    bench.check()
    decode = "decode_documents" if name == "lanes" else "decode_streams"
    real = getattr(benches, decode)
    # A decoder that loses a document.
    monkeypatch.setattr(benches, decode, lambda *given: [*real(*given)[:-1], []])
    with pytest.raises(AssertionError, match="did not come back"):
        bench.check()
