"""Files and folders that survive a power cut."""

from kvbench.config import durable


def test_folders_are_made_and_synced_from_above(tmp_path, monkeypatch):
    """Each folder that is made has its name on the disk: the one above it is synced."""
    synced = []
    monkeypatch.setattr(durable, "sync", synced.append)
    durable.make_folder(tmp_path / "a" / "b" / "c")
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
