"""The Hugging Face cache as its client lays it out, read without that client."""

import pytest

from model.errors import ModelError
from model.hub.cache import CachedRepository, cache_dir, check_revision, is_offline, is_repository
from tests.support.hub import COMMIT

FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def repository(tmp_path):
    """A cached repository: a blob for each file, linked from the snapshot, and the branch main."""
    cached = CachedRepository.of(tmp_path, "org/tiny")
    snapshot = cached.folder / "snapshots" / COMMIT
    for folder in (cached.folder / "refs", cached.folder / "blobs", snapshot):
        folder.mkdir(parents=True)
    (cached.folder / "refs" / "main").write_text(COMMIT)
    for name in FILES:
        (cached.folder / "blobs" / name.upper()).write_bytes(b"{}")
        (snapshot / name).symlink_to(f"../../blobs/{name.upper()}")
    return cached


@pytest.mark.parametrize("revision", ["main", COMMIT, COMMIT[:7], COMMIT[:39]])
def test_a_complete_snapshot_is_found_by_branch_and_commit(repository, revision):
    assert repository.complete_snapshot(revision) == repository.folder / "snapshots" / COMMIT


@pytest.mark.parametrize("name", FILES)
def test_a_file_or_its_blob_that_is_missing(repository, name):
    (repository.folder / "blobs" / name.upper()).unlink()
    with pytest.raises(ModelError, match=f"^has no {name}"):
        repository.complete_snapshot("main")


def test_an_interrupted_download_is_no_model(repository):
    repository.unverified("f" * 40).touch()
    assert repository.complete_snapshot("main").name == COMMIT, "another commit was interrupted"
    repository.unverified(COMMIT).touch()
    with pytest.raises(ModelError, match=r"^is an interrupted download$"):
        repository.complete_snapshot("main")


def test_a_short_commit_of_several_is_none(repository):
    (repository.folder / "snapshots" / f"{COMMIT[:-1]}f").mkdir()
    assert repository.snapshot(COMMIT[:39]) is None
    assert repository.snapshot(COMMIT) is not None


@pytest.mark.parametrize("ref", ["", "../../..", "f" * 40, "/etc"])
def test_a_ref_names_a_commit_that_is_there_or_nothing(repository, ref):
    (repository.folder / "refs" / "main").write_text(ref)
    for revision in ("main", "other"):
        with pytest.raises(ModelError, match=f"^has no revision {revision}, only {COMMIT}$"):
            repository.complete_snapshot(revision)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "HUGGINGFACE_HUB_CACHE": "/c"}, "/a"),
        ({"HF_HOME": "/b", "HUGGINGFACE_HUB_CACHE": "/c"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
    ],
)
def test_the_folder_is_the_clients_own(environ, folder):
    assert str(cache_dir(environ)) == folder


@pytest.mark.parametrize("value", ["1", "on", "Yes", "TRUE"])
def test_offline_words(value):
    assert is_offline({"HF_HUB_OFFLINE": value})
    assert is_offline({"TRANSFORMERS_OFFLINE": value})
    assert not is_offline({"HF_HUB_OFFLINE": "0"})


@pytest.mark.parametrize("name", ["org/name", "Qwen/Qwen3-0.6B", "a/b_c.d"])
def test_names_of_repositories(name):
    assert is_repository(name)


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "../x", "a/..", "a--b/c", "/a/b", "a/b ", "é/b", "a/-b", "https://h/a"]
)
def test_words_that_are_none(name):
    assert not is_repository(name)


@pytest.mark.parametrize("revision", ["../main", "/etc", "a b", "", "x" * 256])
def test_a_revision_stays_in_its_folder(revision):
    with pytest.raises(ModelError, match="is not a revision"):
        check_revision(revision)
    check_revision("refs/pr/1")
