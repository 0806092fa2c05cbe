import inspect
from collections.abc import Callable
from pathlib import Path

import pluggy
import pytest

from nemo_ext.data.text.documents import Document, ReadReport, Source
from nemo_ext.data.text.sources import load_source

Read = Callable[[Source], tuple[list[Document], ReadReport]]


def test_python_stdlib_gives_its_code_in_a_fixed_order(read_all: Read) -> None:
    source = load_source({"kind": "python_stdlib"})

    documents, _ = read_all(source)
    texts = {document.id: document.text for document in documents}

    assert list(texts) == sorted(texts)
    assert len(texts) == len(documents)
    assert texts["stdlib/inspect.py"] == Path(inspect.__file__).read_text()
    assert not [name for name in texts if "/test/" in name or "site-packages" in name or "_sysconfigdata" in name]
    assert sum(len(text) for text in texts.values()) > 5_000_000


def test_docstrings_follow_their_names(read_all: Read) -> None:
    source = load_source({"kind": "docstrings", "packages": ["pluggy"]})

    texts = {document.id: document.text for document in read_all(source)[0]}

    managers = texts["site-packages/pluggy/_manager.py"]
    assert f"PluginManager.register\n\n{inspect.getdoc(pluggy.PluginManager.register)}\n" in managers
    assert "def register" not in managers
    assert all(name.startswith("site-packages/pluggy/") for name in texts)


def test_package_docs_hold_readmes_licences_and_comments_of_headers(read_all: Read) -> None:
    source = load_source({"kind": "package_docs", "packages": ["numpy", "pluggy"]})

    texts = {document.id: document.text for document in read_all(source)[0]}

    readme = next(text for name, text in texts.items() if "/pluggy-" in name and name.endswith("/METADATA"))
    assert "Metadata-Version" not in readme
    assert "plugin" in readme
    assert any("LICENSE" in name for name in texts)
    headers = "".join(text for name, text in texts.items() if name.endswith(".h"))
    assert "C API version" in headers
    assert "/*" not in headers
    assert "#include" not in headers


def test_package_docs_hold_the_language_reference() -> None:
    source = load_source({"kind": "package_docs"})
    part = next(part for part in source.parts(max_documents=1, max_size=1) if part.name.endswith("topics.py"))

    topics = {document.id: document.text for document in source.read(part, ReadReport())}

    assert topics["stdlib/pydoc_data/topics.py#while"].startswith('The "while" statement')


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match=r"package 'plugy' of `packages` is not installed; did you mean 'pluggy'"):
        load_source({"kind": "docstrings", "packages": ["plugy"]}).check()


def test_a_package_outside_site_packages_is_read(
    read_all: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `pip install --target` and PYTHONPATH."""
    (tmp_path / "far_package").mkdir()
    (tmp_path / "far_package" / "__init__.py").write_text('"""A package of another folder."""\n')
    monkeypatch.syspath_prepend(tmp_path)

    documents, _ = read_all(load_source({"kind": "docstrings", "packages": ["far_package"]}))

    (document,) = documents
    assert "A package of another folder." in document.text
    assert document.id == "site-packages/far_package/__init__.py"
