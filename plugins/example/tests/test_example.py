from resilio.testing import StorageContract
from resilio_example.storage import SqliteStorage


class TestSqlite(StorageContract):
    def make_storage(self, tmp_path):
        return SqliteStorage(f"{tmp_path}/run.db")
