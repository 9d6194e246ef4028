"""What the parser of each verb says: of a mistake one line that names the cure, of itself groups and examples."""

from __future__ import annotations

import shlex

import pytest

from rubato.cli.main import VERBS, main, parser

MISTAKES = [
    ("serv", "rubato: unknown command 'serv': did you mean 'serve'? See `rubato --help`"),
    ("--versoin", "rubato: unknown option --versoin: did you mean '--version'? See"),
    ("simulate --polcy=edf", "rubato simulate: unknown option --polcy: did you mean '--policy'? See `rubato simulate "),
    ("sweep --rat 3", "rubato sweep: unknown option --rat: did you mean '--rates'? See"),  # not: --rates is required
    ("simulate --zzz", "rubato simulate: unknown option --zzz; see `rubato simulate --help`"),
    ("sweep --seeds 1", "rubato sweep: the following arguments are required: --rates; see"),
    ("serve a b", "rubato serve: unexpected argument 'b'; see"),
    ("plan --chat 300", "rubato plan: argument --chat: '300': give TTFT and TPOT in ms, such as 1000,80; see"),
    ("plan --chat 300,x", "give TTFT and TPOT in ms, such as 1000,80 (could not convert string to float: 'x'); see"),
    ("serve --kv-cache-memory-bytes 4GB", "'4GB': give bytes, such as 4G or 4294967296; see"),
    ("plan --kind mix.yaml", "unknown option --kind: did you mean '--kinds'?"),  # no abbreviations
]


@pytest.mark.parametrize(("command", "says"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_cure(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert says in error
    assert error.count("\n") == 1


def test_values_that_look_like_options_pass() -> None:
    for words in (["serve", "--event-log=--x"], ["simulate", "--texts"], ["serve", "--", "--model"]):
        parser({words[0]}).parse_args(words)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_explains_every_option_and_has_examples(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = parser({verb})
    own = commands.own_parsers()[verb]
    assert not [action.option_strings for action in own._actions if not action.help]
    text = own.format_help()
    assert "%%" not in text
    assert text.startswith(f"usage: rubato {verb}")
    assert text.split("\n\n")[0].count("\n") == 0  # one line of usage
    examples = [line.strip() for line in text.split("examples:\n")[1].splitlines()]
    assert len(examples) >= 2
    for example in examples:
        commands.parse_args(shlex.split(example.split(" > ")[0])[1:])


def test_no_words_get_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("vllms", "ours"),
    [
        ("bench http://a --request-rate 3 --num-prompts 5 --max-concurrency 2", "rate=3.0 count=5 concurrency=2"),
        ("serve --served-model-name m --tensor-parallel-size 2", "served_model_name=m tensor_parallel_size=2"),
        ("serve --kv-cache-memory-bytes 4G", "kv_gib=4.0"),
        ("serve --kv-cache-memory-bytes 2147483648", "kv_gib=2.0"),
        ("profile --kv-cache-memory-bytes 512M", "kv_gib=0.5"),
    ],
)
def test_options_are_known_by_vllms_names(vllms: str, ours: str) -> None:
    args = vars(parser().parse_args(vllms.split()))
    assert [f"{name}={args[name]}" for name, _ in (word.split("=") for word in ours.split())] == ours.split()
