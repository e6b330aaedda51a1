"""The promises of `resilio.storage.Storage`, as tests. A storage that passes them can hold checkpoints.

For a plugin, all of its test file may be::

    from resilio.testing import StorageContract

    class TestMyStorage(StorageContract):
        def make_storage(self, tmp_path):
            return MyStorage("mystore://bucket/" + tmp_path.name)     # empty at each test

A test that fails says which promise is broken, to the letter of the docstring it is written in. What `capabilities` do
not promise is skipped. For a store whose parts or pages are of other sizes than S3's, or one that is far away, set
`large_size_bytes` and `many_objects` in the class.
"""

from __future__ import annotations

from ._contract_reading import ReadContract
from ._contract_sharing import ShareContract
from ._contract_writing import WriteContract

__all__ = ["StorageContract"]


class StorageContract(WriteContract, ReadContract, ShareContract):
    """All the promises. Subclass it, and say in `make_storage` how to make an empty storage.

    Attributes:
        large_size_bytes: length of the large objects. For a store with parts: above two parts, and no multiple of one.
        many_objects: how many are listed and deleted at once. For a store that answers in pages: above one page.
    """
