"""Every kind of store keeps the promises of `Storage` against a real server, or says which one it cannot keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio.storage import Storage
from resilio.testing import StorageContract
from resilio_fsspec import open_fsspec


class TestS3(StorageContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3_endpoint: str) -> None:
        pass

    def make_storage(self, tmp_path: Path) -> Storage:
        return open_fsspec(f"s3://tests{tmp_path}")

    @pytest.mark.full
    def test_create_if_absent_has_exactly_one_winner(self, storage: Storage) -> None:
        """The server here lets losers wait for seconds; test_fsspec_s3.py has a smaller race."""
        super().test_create_if_absent_has_exactly_one_winner(storage)

    @pytest.mark.full
    def test_one_process_of_many_wins_a_create(self, storage: Storage) -> None:
        super().test_one_process_of_many_wins_a_create(storage)
