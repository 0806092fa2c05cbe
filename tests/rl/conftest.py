import pytest


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)
