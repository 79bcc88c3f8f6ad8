"""Folders in a bucket: complete or not there, whatever fails in between. fsspec's memory stands for one."""

import fsspec
import pytest

from xla_attention.remote import COMPLETE, Remote, is_url


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / "here"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield Remote("memory://bucket/run/")
    memory.store.clear()


def write(bucket, name, **files):
    for file, text in files.items():
        path = bucket.path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def there(bucket):
    return {name.removeprefix("/bucket/run/") for name in bucket._fs.store}


def test_what_is_a_url():
    assert is_url("gs://bucket/run") and is_url("memory://x")
    assert not is_url("/runs/demo") and not is_url("runs")


def test_a_published_folder_comes_back_on_another_host(bucket, monkeypatch, tmp_path):
    write(bucket, "one", a="1")
    write(bucket, "one/parts", b="2")
    bucket.publish("one")
    assert there(bucket) == {"one/a", "one/parts/b", f"one/{COMPLETE}"} and bucket.complete() == ["one"]

    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / "elsewhere"))
    other = Remote(bucket.url)
    copy = other.fetch("one", without="parts")
    assert copy.is_relative_to(tmp_path / "elsewhere")
    assert (copy / "a").read_text() == "1" and not (copy / "parts").exists()


def test_an_upload_that_fails_leaves_a_folder_that_is_not_complete(bucket, monkeypatch):
    write(bucket, "one", a="1", b="2")
    put = type(bucket._fs).put

    def fail_after_one(self, here, to, **options):
        put(self, here[:1], to[:1], **options)
        raise RuntimeError("connection lost")

    monkeypatch.setattr(type(bucket._fs), "put", fail_after_one)
    with pytest.raises(OSError, match="memory://bucket/run: RuntimeError: connection lost"):
        bucket.publish("one")
    assert len(there(bucket)) == 1 and bucket.complete() == [] and bucket.names() == ["one"]


def test_a_copy_of_an_earlier_folder_of_that_name_is_replaced(bucket, monkeypatch, tmp_path):
    write(bucket, "one", a="old")
    bucket.publish("one")
    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / "elsewhere"))
    other = Remote(bucket.url)
    write(other, "one", a="new")
    other.publish("one")
    assert (bucket.fetch("one") / "a").read_text() == "new"


def test_removed_first_is_what_says_that_it_is_complete(bucket, monkeypatch):
    write(bucket, "one", a="1")
    bucket.publish("one")

    def refuse(*_, **__):
        raise PermissionError("no")

    monkeypatch.setattr(bucket._fs, "rm", refuse)
    with pytest.raises(PermissionError):
        bucket.remove("one")
    assert bucket.complete() == [] and "one/a" in there(bucket)
    assert not (bucket.path / "one").exists()


def test_what_is_not_there_is_not_pushed_and_a_file_is_replaced(bucket):
    write(bucket, "", log="1")
    bucket.push(["log", "plots"])
    write(bucket, "", log="12")
    bucket.push(["log"])
    (bucket.path / "log").write_text("")
    bucket.fetch_file("log")
    assert (bucket.path / "log").read_text() == "12" and there(bucket) == {"log"}


def test_a_scheme_without_its_package(monkeypatch):
    def missing(url):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(ValueError, match=r"gs://b/run cannot be opened: .*\(pip install gcsfs\)"):
        Remote("gs://b/run")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="nosuch://x cannot be opened: Protocol not known: nosuch"):
        Remote("nosuch://x")
