"""The YAML reader: scalars mean what they say, faults name their line, nothing blows up, and dump reads back."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simdist.scenario import strict_yaml
from simdist.scenario.strict_yaml import Problem, TextPosition, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("True", "True"),
        ("NO", "NO"),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),
        ("2023-04-07", "2023-04-07"),
        ("1e9", 1e9),
        ("1_000", "1_000"),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        (".5", 0.5),
        ("-3", -3),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("'1'", "1"),
        ('"true"', "true"),
    ],
)
def test_scalar_means_what_it_says(text, value):
    document = parse(f"key: {text}")
    assert document.problems == []
    assert document.root == {"key": value}
    assert type(document.root["key"]) is type(value)


def test_every_value_has_its_place():
    document = parse("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n")
    places = {path: document.locate(path)[0] for path in [("a",), ("a", "b"), ("a", "c", 1), ("a", "c", 1, "d")]}
    assert places == {
        ("a",): TextPosition(1, 1),
        ("a", "b"): TextPosition(2, 3),
        ("a", "c", 1): TextPosition(5, 7),
        ("a", "c", 1, "d"): TextPosition(5, 8),
    }


def test_missing_value_has_the_place_of_what_would_hold_it():
    document = parse("a:\n  b: 1\n")
    assert document.locate(("a", "z", "y")) == (TextPosition(1, 1), ("a", "z", "y"))
    assert document.locate(("a", "b", "int")) == (TextPosition(2, 3), ("a", "b"))


def test_alias_is_the_value_of_its_anchor():
    document = parse("a: &x {b: 1}\nc: *x\n")
    assert document.root == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.locate(("c",))[0].line == 2


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3", 3, "duplicate key 'a': line 1 has it too"),
        ("levels: {2: 8, 02: 9}", 1, "duplicate key 2: line 1 has it too"),
        ("a:\n\tb: 1", 2, "a tab in the indentation: indent with spaces"),
        ("a: [1, 2", 1, "not YAML: "),
        ("a: 1\nb: c: d", 2, "not YAML: mapping values are not allowed"),
        ("a: !!python/object:os.system ls", 1, "tags are not supported"),
        ("a: &x {b: 1}\nc:\n  <<: *x", 3, "merge keys are not supported"),
        ("a: *nowhere", 1, "*nowhere has no anchor &nowhere before it"),
        ("a: &x [*x]", 1, "*x has no anchor &x before it"),
        ("? [1, 2]\n: 3", 1, "a key is text or a whole number"),
        ("a: 1\n---\nb: 2", 2, "a second document begins"),
        ("a: \x00", 1, "not text that YAML can hold"),
        ("a: \ud800", 1, "not text that YAML can hold"),
        ("[" * 100_000, 1, "nested more than 50 levels deep"),
        ("{a: " * 100_000, 1, "nested more than 50 levels deep"),
        ("- " * 100_000, 1, "nested more than 50 levels deep"),
    ],
)
def test_fault_is_reported_with_its_line(text, line, message):
    (problem,) = parse(text).problems
    assert problem.line == line
    assert message in problem.message


def test_faults_of_keys_are_all_reported():
    problems = parse("a: 1\na: 2\nb: {c: 1, c: 2}\n").problems
    assert [problem.path for problem in problems] == [("a",), ("b", "c")]


def test_billion_laughs_are_refused_at_once():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (problem,) = parse("\n".join(lines)).problems
    assert problem == Problem(6, ("a5", 7), "aliases expand to more than 1000000 values")


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text() | st.sampled_from(["NO", "1e9", "0x1F", "1:30", "~", "<<", "=", "2023-04-07", ".inf", "010", "null"])
trees = st.recursive(
    scalars | texts, lambda inner: st.lists(inner) | st.dictionaries(texts.filter(lambda key: key != "<<"), inner)
)


@given(trees)
def test_dumped_value_reads_back(value):
    document = parse(strict_yaml.dump({"value": value}))
    assert document.problems == []
    assert document.root == {"value": value}


@given(trees)
def test_dumped_value_reads_back_in_a_plain_loader(value):
    assert yaml.safe_load(strict_yaml.dump({"value": value})) == {"value": value}


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@ \n\t?,.1") | st.text())
def test_any_text_is_parsed_or_reported(text):
    document = parse(text)
    assert document.problems or document.root is None or document.root == parse(text).root
