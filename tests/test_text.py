"""Tokens are bytes, labels the next token, and the text starts over at its end."""

from itertools import pairwise
from pydoc_data import topics

import pytest
import torch
from models import small_model

import terapipe as tp
from terapipe.engine.text import IGNORED, Batch, read_batch, read_tokens
from terapipe.errors import SpecError

TOPICS = "\n".join(topics.topics.values()).encode()


def cut(n_microbatches: int, n_sequences: int, seq_tokens: int) -> tp.Slicing:
    return tp.uniform_slicing(seq_tokens, 1, n_microbatches, n_sequences)


@pytest.fixture
def alphabet(tmp_path):
    path = tmp_path / "alphabet.txt"
    path.write_bytes(b"abcdefghij")  # bytes 97…106
    return str(path)


class TestReadTokens:
    @pytest.mark.parametrize("vocab_size", [2, 3, 61, 97, 128, 255, 256, 257, 50257])
    def test_a_token_is_the_byte_modulo_the_vocabulary(self, vocab_size):
        tokens = read_tokens(None, vocab_size)
        assert tokens.tolist() == [byte % vocab_size for byte in TOPICS]
        assert tokens.dtype == torch.int64

    @pytest.mark.parametrize("vocab_size", range(2, 260))
    def test_every_vocabulary_from_2_holds_every_byte(self, tmp_path, vocab_size):
        path = tmp_path / "bytes.bin"
        path.write_bytes(bytes(range(256)))
        tokens = read_tokens(str(path), vocab_size)
        assert tokens.tolist() == [byte % vocab_size for byte in range(256)]
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size

    def test_the_text_that_python_ships_is_over_400_kilobytes_of_english(self):
        assert len(read_tokens(None, 256)) > 400_000
        assert b'The "if" statement is used for conditional execution' in TOPICS

    def test_umlauts_are_their_utf8_bytes(self, tmp_path):
        path = tmp_path / "umlauts.txt"
        path.write_text("größer", encoding="utf-8")
        assert read_tokens(str(path), 256).tolist() == [103, 114, 195, 182, 195, 159, 101, 114]

    def test_a_file_that_changed_is_read_again(self, tmp_path):
        path = tmp_path / "notes.txt"
        path.write_bytes(b"first")
        assert bytes(read_tokens(str(path), 256).tolist()) == b"first"
        path.write_bytes(b"second")
        assert bytes(read_tokens(str(path), 256).tolist()) == b"second"

    def test_an_empty_file_is_refused_by_name(self, tmp_path):
        path = tmp_path / "empty.txt"
        path.touch()
        with pytest.raises(ValueError, match=r"empty\.txt' is empty.*at least one byte"):
            read_tokens(str(path), 256)

    def test_an_empty_file_is_refused_before_any_process_starts(self, tmp_path):
        path = tmp_path / "empty.txt"
        path.touch()
        with pytest.raises(SpecError, match=r"empty\.txt"):
            tp.RunSpec(small_model(), "[(1, [12])]", text=path)


class TestReadBatch:
    def test_first_batches_of_ten_letters_typed_out(self, alphabet):
        a = ord("a")
        batch = read_batch(alphabet, 256, cut(2, 1, 4), 0)
        assert [(tokens - a).tolist() for tokens in batch.tokens] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
        assert [(labels - a).tolist() for labels in batch.labels] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
        batch = read_batch(alphabet, 256, cut(2, 1, 4), 1)
        assert [(tokens - a).tolist() for tokens in batch.tokens] == [[[8, 9, 0, 1]], [[2, 3, 4, 5]]]
        assert [(labels - a).tolist() for labels in batch.labels] == [[[9, 0, 1, 2]], [[3, 4, 5, 6]]]

    def test_a_text_shorter_than_a_sequence_repeats(self, tmp_path):
        path = tmp_path / "short.txt"
        path.write_bytes(b"ab")
        batch = read_batch(str(path), 256, cut(1, 1, 5), 0)
        assert bytes(batch.tokens[0][0].tolist()) == b"ababa"
        assert bytes(batch.labels[0][0].tolist()) == b"babab"

    def test_one_byte_is_enough(self, tmp_path):
        path = tmp_path / "one.txt"
        path.write_bytes(b"x")
        batch = read_batch(str(path), 256, cut(1, 2, 3), 7)
        assert bytes(batch.tokens[0].flatten().tolist()) == bytes(batch.labels[0].flatten().tolist()) == b"xxxxxx"

    @pytest.mark.parametrize("step", [0, 1, 5, 100_000])
    def test_labels_are_the_next_tokens(self, step):
        batch = read_batch(None, 61, cut(2, 3, 12), step)
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            assert torch.equal(tokens[:, 1:], labels[:, :-1])

    def test_consecutive_batches_read_the_text_on(self):
        batches = [torch.cat(read_batch(None, 256, cut(2, 2, 6), step).tokens) for step in range(3)]
        assert bytes(torch.cat(batches).flatten().tolist()) == TOPICS[: 3 * 4 * 6]

    def test_how_sequences_are_spread_over_microbatches_and_slices_does_not_change_the_batch(self):
        expected = torch.cat(read_batch(None, 61, cut(1, 4, 12), 3).tokens)
        for text in ("[(1, [12])] * 4", "[(3, [7, 1, 4]), (1, [12])]", "[(2, [6, 6])] * 2"):
            batch = read_batch(None, 61, tp.Slicing.parse(text), 3)
            assert [len(tokens) for tokens in batch.tokens] == [
                each.n_sequences for each in tp.Slicing.parse(text).microbatches
            ]
            assert torch.equal(torch.cat(batch.tokens), expected)

    def test_each_sequence_starts_where_the_one_before_ended(self):
        rows = torch.cat(read_batch(None, 256, cut(3, 2, 5), 2).tokens).tolist()
        labels = torch.cat(read_batch(None, 256, cut(3, 2, 5), 2).labels).tolist()
        assert all(after[0] == label[-1] for (_, label), (after, _) in pairwise(zip(rows, labels, strict=True)))


class TestValidLabels:
    def test_real_text_has_as_many_valid_labels_as_tokens(self):
        assert read_batch(None, 61, cut(2, 3, 12), 0).n_valid == 72

    def test_labels_of_minus_100_do_not_count(self):
        labels = [torch.tensor([[1, IGNORED, 2]]), torch.tensor([[IGNORED, IGNORED, IGNORED], [0, 1, IGNORED]])]
        assert Batch([], labels).n_valid == 4
