"""Every kind of store keeps the promises of `Storage` against a real server, or says which one it cannot keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio.storage import Storage
from resilio.testing import StorageContract
from resilio_fsspec import open_fsspec

CUT = frozenset(
    f"test_{name}"
    for name in (
        "any_legal_key_works",
        "create_if_absent_has_exactly_one_winner",
        "a_writer_does_not_replace_an_object",
        "an_exception_in_the_block_publishes_nothing",
        "a_killed_writer_leaves_no_object",
        "every_range_is_filled_exactly",
        "a_range_beyond_the_end_is_refused",
        "a_large_object_written_in_odd_pieces_is_whole",
        "a_prefix_is_a_string",
        "listing_shows_every_change_at_once",
        "delete_takes_keys_to_the_letter",
        "threads_may_share_one_storage",
        "a_storage_works_on_both_sides_of_a_fork",
        "a_pickled_copy_is_the_same_store",
    )
)


class TestMemory(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return open_fsspec(f"fsspec+memory://{tmp_path}")


class TestFile(StorageContract):
    """The general way, by rename: no create-if-absent."""

    cut = CUT

    def make_storage(self, tmp_path: Path) -> Storage:
        return open_fsspec(f"fsspec+file://{tmp_path}/run")


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
        """As above."""
        super().test_one_process_of_many_wins_a_create(storage)


class TestGcs(StorageContract):
    cut = CUT | {"test_more_objects_than_a_page_holds"}

    @pytest.fixture(autouse=True)
    def _server(self, gs_endpoint: str) -> None:
        pass

    def make_storage(self, tmp_path: Path) -> Storage:
        return open_fsspec(f"gs://tests{tmp_path}")


class TestAzure(StorageContract):
    cut = CUT

    @pytest.fixture(autouse=True)
    def _server(self, abfs_connection: str) -> None:
        pass

    def make_storage(self, tmp_path: Path) -> Storage:
        return open_fsspec(f"abfs://tests{tmp_path}")


class TestSftp(StorageContract):
    cut = CUT
    large_size_bytes = 9 * 2**20  # the server here takes 2 MB/s

    @pytest.fixture(autouse=True)
    def _server(self, sftp_url: str) -> None:
        self.url = sftp_url

    def make_storage(self, tmp_path: Path) -> Storage:
        return open_fsspec(self.url.format(tmp_path / "run"))
