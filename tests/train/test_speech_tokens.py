"""Vocabulary layout and parsing, against the numbers of the published checkpoint and cases worked by hand."""

import subprocess
import sys

import pytest

from cosyvoice import speech_tokens as st
from cosyvoice.speech_tokens import VocabLayout, parse


class Vocabulary:
    """As much of a tokenizer as the layout asks for."""

    name_or_path = "somewhere"

    def __init__(self, pieces):
        self.pieces = dict(pieces)

    def get_vocab(self):
        return self.pieces


PUBLISHED = VocabLayout.build(first_speech_id=151663)
SMALL = VocabLayout.build(first_speech_id=100, n_speech=200)


def test_layout_of_the_published_checkpoint():
    # Spec, section 3.
    assert PUBLISHED.n_speech == 6561 == 3**8
    assert PUBLISHED.end_ids == (158224, 158225, 158226)
    assert (PUBLISHED.sos_id, PUBLISHED.task_id) == (158227, 158228)
    assert PUBLISHED.n_tokens == 158229
    assert PUBLISHED.padded_size == 158336
    assert PUBLISHED.padded_size - PUBLISHED.n_head == 151772
    assert len(st.TEXT_SPECIALS) == 19


def test_layout_of_the_golden_checkpoint():
    layout = VocabLayout.build(276, 200)  # golden/llm_case.json
    assert (layout.end_ids, layout.sos_id, layout.task_id) == ((476, 477, 478), 479, 480)
    assert (layout.n_tokens, layout.padded_size) == (481, 512)


def test_layout_is_looked_up():
    assert VocabLayout.from_tokenizer(Vocabulary(SMALL.pieces())) == SMALL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"<|s_0|>": None}, r"somewhere: found no piece '<\|s_0\|>'"),
        ({"<|eos2|>": None}, r"'<\|eos2\|>': found id None, expected 301"),
        ({"<|sos|>": 7}, r"'<\|sos\|>': found id 7, expected 303"),
        ({"<|s_5|>": 9999}, r"'<\|s_5\|>': found id 9999, expected 105"),
        ({"<|s_150|>": None}, r"'<\|eos1\|>': found id 300, expected 250"),  # a hole ends the run of codes
    ],
)
def test_a_damaged_vocabulary_is_refused(change, message):
    pieces = {k: v for k, v in (dict(SMALL.pieces()) | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        VocabLayout.from_tokenizer(Vocabulary(pieces))


def test_parse_stops_at_the_first_end_token():
    parsed = parse("<|s_12|><|s_7|><|eos1|><|s_3|><|s_9999|>")
    assert (parsed.ids, parsed.ended) == ([12, 7], True)
    assert (parsed.out_of_range, parsed.unknown) == ([], [])
    for end in ("<|eos2|>", "<|eos3|>"):
        assert parse(f"<|s_1|>{end}<|s_2|>").ids == [1]


def test_parse_without_an_end_keeps_the_last_token():
    parsed = parse("<|s_1|><|s_2|>")
    assert (parsed.ids, parsed.ended) == ([1, 2], False)


def test_parse_refuses_codes_outside_the_table():
    parsed = parse("<|s_6560|><|s_6561|><|s_-1|><|s_0|><|s_70000|>")
    assert parsed.ids == [6560, 0]
    assert parsed.out_of_range == [6561, -1, 70000]
    assert parse("<|s_200|><|s_199|>", SMALL).out_of_range == [200]


def test_parse_reports_what_is_neither_speech_nor_end():
    parsed = parse("um <|s_1|>\n<|sos|><|s_2|>text<|eos4|>")
    assert parsed.ids == [1, 2]
    assert parsed.unknown == ["um", "<|sos|>", "text<|eos4|>"]
    assert not parsed.ended


@pytest.mark.parametrize("answer", ["", "   ", "<|eos1|>", "hello"])
def test_parse_of_answers_without_speech(answer):
    parsed = parse(answer)
    assert parsed.ids == []
    assert parsed.ended == (answer == "<|eos1|>")


def test_repeat_runs():
    codes = [4, 4, 4, 5, 6, 6, 4]
    assert parse("".join(map(st.speech_piece, codes))).repeat_runs == [(4, 3), (6, 2)]
    assert parse("<|s_4|><|eos1|><|s_4|>").repeat_runs == []


def test_ids_and_text_are_read_alike():
    pieces = dict(SMALL.pieces())
    text = "<|s_0|><|s_199|><|s_199|><|sos|><|s_3|><|eos3|><|s_8|>"
    ids = [pieces["<|" + piece] for piece in text.split("<|")[1:]]
    from_text, from_ids = parse(text, SMALL), parse(ids, SMALL)
    assert from_ids.ids == from_text.ids == [0, 199, 199, 3]
    assert from_ids.ended
    assert from_text.ended
    assert from_ids.repeat_runs == from_text.repeat_runs == [(199, 2)]
    assert (from_ids.unknown, from_text.unknown) == (["id 303"], ["<|sos|>"])


def test_ids_need_a_layout():
    with pytest.raises(ValueError, match="ids without a layout"):
        parse([1, 2])


def test_prompt():
    assert st.render_prompt("你好") == "<|sos|>你好<|task_id|>"
    assert st.render_prompt("好", "你", [3, 6560]) == "<|sos|>你好<|task_id|><|s_3|><|s_6560|>"


@pytest.mark.parametrize(
    "token",
    ["<|sos|>", "<|task_id|>", "<|s_0|>", "<|s_99999|>", "<|eos2|>", "<|endoftext|>", "<|im_end|>", "<|endofprompt|>"],
)
def test_control_tokens_in_a_text_are_found(token):
    assert st.find_control_tokens(f"a{token}b{token}") == [token, token]


def test_markup_that_users_write_is_no_control():
    assert st.find_control_tokens("[breath]<strong>好</strong>[laughter] <s_1> |sos|") == []


def test_the_module_imports_neither_torch_nor_transformers():
    code = "import sys, cosyvoice.speech_tokens; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
