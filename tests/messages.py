"""Every text that the package raises, warns of or gives as a reason, read from its sources, "..." for what is filled in."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP_CALL = re.compile(r"\b(reasons\.add|TORCH_CHECK\w*|TORCH_WARN\w*)\(")
CPP_RETURN = re.compile(r'\breturn (?=")')
LITERAL = re.compile(r'^(?:"(?:[^"\\]|\\.)*"\s*)+$')


def _joined(parts):
    return re.sub(r"(\.\.\.)+", "...", "".join(parts).replace("%s", "...")).strip()


def _cpp_arguments(text, start, between=",", end=")"):
    """The top-level arguments of the call whose opening bracket is just before `start`; or the terms of a sum up to a ";"."""
    depth, quoted, arguments, begin, i = 0, False, [], start, start
    while True:
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}" and depth:
            depth -= 1
        elif c in between + end and not depth:
            arguments.append(" ".join(text[begin:i].split()))
            if c == end:
                return arguments
            begin = i + 1
        i += 1


def _cpp_texts(text):
    for match in CPP_CALL.finditer(text):
        arguments = _cpp_arguments(text, match.end())
        if not match[1].startswith("reasons"):
            arguments = arguments[1:]  # the condition
        parts = _cpp_parts(arguments)
        if any(part != "..." for part in parts):
            yield _joined(parts)
    for match in CPP_RETURN.finditer(text):
        text_of_sum = _joined(_cpp_parts(_cpp_arguments(text, match.end(), "+", ";")))
        if len(text_of_sum) > 40:  # a sentence, not a shape or a name
            yield text_of_sum


def _cpp_parts(arguments):
    return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', a)) if LITERAL.match(a) else "..." for a in arguments]


def _python_text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _python_text(node.left) + _python_text(node.right)
    return "..."


RAISED = re.compile(r"(Error|Warning|BuildFailed)$")


def _spoken(node):
    """The expression that holds a message, if the node gives one: raised, warned of, or a problem of the installation; None."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("warn", "warning") or RAISED.search(name):
        return node.args[0]
    if name == "append" and getattr(node.func.value, "id", "") == "notes":
        return node.args[0]
    if name == "Library":
        return next((k.value for k in node.keywords if k.arg == "problem"), node.args[2] if len(node.args) > 2 else None)
    return None


def _resolved(tree, expressions):
    """The expressions, and for a variable what its function assigns to it."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for expression in expressions:
        if not isinstance(expression, ast.Name):
            yield expression
            continue
        for function in functions:
            nodes = list(ast.walk(function))
            if expression in nodes:
                yield from (n.value for n in nodes if isinstance(n, ast.Assign) and expression.id in map(_name, n.targets))


def _name(node):
    return getattr(node, "id", None)


def _python_texts(tree):
    refusals = (n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "refusal" for n in ast.walk(f))
    returned = [n.value for n in refusals if isinstance(n, ast.Return) and n.value]
    for expression in [*_resolved(tree, filter(None, map(_spoken, ast.walk(tree)))), *returned]:
        text = _joined([_python_text(expression)])
        if text not in ("...", ""):
            yield text


def messages():
    """{text: file}, of the binding and of the Python package; arguments of the command line apart, argparse explains those."""
    found = {}
    for path in sorted((ROOT / "src" / "binding").glob("*.cpp")) + sorted((ROOT / "torch_flashsdpa").rglob("*.py")):
        if "bench" in path.parts:
            continue  # its AssertionErrors say what a wrong kernel did
        source = path.read_text()
        for text in _cpp_texts(source) if path.suffix == ".cpp" else _python_texts(ast.parse(source)):
            found.setdefault(text, path.name)
    return found
