"""The pages for users: their code runs, their links lead somewhere, the messages and the API they explain are the sources'."""

import importlib.util
import re
from pathlib import Path

import messages
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page, language):
    return [code for name, code in FENCE.findall(page.read_text()) if name == language]


RUN_HERE = [page for page in PAGES if blocks(page, "python") and page.name != "export.md"]  # that one: test_export.py


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_code_runs(page, tmp_path, monkeypatch):
    """The blocks of a page in order, in one namespace, as a reader would type them."""
    if "transformers" in "".join(blocks(page, "python")):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    try:
        for index, code in enumerate(blocks(page, "python")):
            exec(compile(code, f"{page.name}, block {index}", "exec"), namespace)
    finally:
        torch.use_deterministic_algorithms(False)


def test_links_lead_somewhere():
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", FENCE.sub("", page.read_text())):
            if not target.startswith("http") and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


def test_named_files_exist():
    dead = []
    for page in PAGES:
        for path in re.findall(r"`((?:src|docs|tests|tools|benchmarks)/[\w./-]+\w/?)(?:::\w+)?`", page.read_text()):
            if not (ROOT / path).exists():
                dead.append(f"{page.name}: {path}")
    assert not dead


def test_every_message_is_explained_and_no_other():
    """docs/troubleshooting.md against the sources, both ways."""
    explained = [line for block in blocks(ROOT / "docs" / "troubleshooting.md", "text") for line in block.splitlines()]
    assert len(explained) == len(set(explained))
    spoken = {" ".join(text.split()): name for text, name in messages.messages().items()}
    unexplained = {text: name for text, name in spoken.items() if text not in explained}
    assert not unexplained
    stale = [line for line in explained if line not in spoken]
    assert not stale


def test_messages_are_found_in_both_languages():
    """The reader of the sources itself: what it would miss, the test above could not ask for."""
    cpp = 'if (reasons.add("a is ", x ? "b" : "c", "; give (", y, ")" " or") && TORCH_CHECK(f(a, b), "no ", g("z")))'
    assert list(messages._cpp_texts(cpp)) == ["a is ...; give (...) or", "no ..."]
    assert list(messages._cpp_texts('return "a sentence of some length about " + (a ? "b" : c) + ", and its" " end";')) == [
        "a sentence of some length about ..., and its end"]
    import ast

    code = "raise ValueError(f'x is {x}; give ' + 'y')\nwarnings.warn('w')\nraise KeyError(name)\nf('no')\nLibrary(0, 0, 'p')"
    code += "\ndef f():\n    text = f'in {a} variable'\n    raise ValueError(text)\ndef g():\n    text = 'another'"
    assert list(messages._python_texts(ast.parse(code))) == ["x is ...; give y", "w", "p", "in ... variable"]


def test_api_page_is_current():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.reference()
    assert tool.PAGE.read_text() == text, "run `python tools/api_reference.py`"
    import torch_flashsdpa

    assert all(f"`torch_flashsdpa.{name}" in text for name in {*torch_flashsdpa.__all__} - {"integrations", "profiler"})
    assert "None" not in re.findall(r"^\n(\w+)\n```$", text, re.M)


def test_every_public_name_has_a_docstring():
    import torch_flashsdpa

    assert all(getattr(torch_flashsdpa, name).__doc__ for name in torch_flashsdpa.__all__)
