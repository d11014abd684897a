"""Benchmarks through lm-eval against a separate computation from the same real files."""

import math

import pytest
import torch

from tests.support.evaluation import copy_first_lines, items
from tokenformer.data.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from tokenformer.errors import DataError
from tokenformer.evaluate.benchmarks import BENCHMARKS
from tokenformer.evaluate.harness_model import HarnessModel
from tokenformer.evaluate.tasks import load_tasks, score_task

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def data(real_data, tmp_path_factory):
    return copy_first_lines(real_data("eval"), tmp_path_factory.mktemp("eval"), 40)


@pytest.fixture(scope="module")
def tasks(data):
    return load_tasks(list(BENCHMARKS), data)


@pytest.fixture
def neox_tokenizer(real_data):
    from transformers import PreTrainedTokenizerFast

    file = str(real_data("tokenizer/20B_tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")


def scores(task, harness_model, limit):
    return {score.metric: score for score in score_task(task, harness_model, limit)}


def log_likelihood(model, context, continuation):
    """The log-likelihood of one request, byte by byte, and whether greedy decoding produces it."""
    most = getattr(model.config, "max_position_embeddings", 2048)
    ids = [*context.encode(), *continuation.encode()][-(most + 1) :]
    count = len(continuation.encode())
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0, -count:].double()
    targets = torch.tensor(ids[-count:])
    each = logits.log_softmax(-1).gather(1, targets[:, None])
    return each.sum().item(), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("task", BENCHMARKS)
def test_scores_equal_a_direct_computation(task, tasks, data, byte_model, tmp_path):
    limit, accuracy = 4, BENCHMARKS[task].metric
    by_hand = items(task, data, limit)
    answers = [[log_likelihood(byte_model, *pair) for pair in item.requests] for item in by_hand]
    harness_model = HarnessModel(byte_model, byte_tokenizer(), tmp_path)
    found = scores(tasks[task], harness_model, limit)
    # Requests and log-likelihoods that lm-eval used.
    (instances,) = [each.instances for each in tasks[task]["tasks"].values()]
    assert [i.args for i in instances] == [pair for item in by_hand for pair in item.requests]
    flat = [answer for item in answers for answer in item]
    for instance, (expected, greedy) in zip(instances, flat, strict=True):
        logprob, is_greedy = instance.resps[-1]
        assert logprob == pytest.approx(expected, rel=1e-5)
        assert is_greedy == greedy
    # Scores that it computed from them.
    if task == "lambada_openai":
        mean = sum(logprob for ((logprob, _),) in answers) / limit
        assert found["perplexity"].value == pytest.approx(math.exp(-mean), rel=1e-4)
        right = [greedy for ((_, greedy),) in answers]
    else:
        right = []
        for item, item_answers in zip(by_hand, answers, strict=True):
            norms = [len(c) if accuracy == "acc_norm" else 1 for c in item.choices]
            values = [lp / norm for (lp, _), norm in zip(item_answers, norms, strict=True)]
            right.append(values.index(max(values)) == item.gold)
    assert found[accuracy].value == pytest.approx(100 * sum(right) / limit)
    assert found[accuracy].items == limit
    p = sum(right) / limit
    expected_error = 100 * math.sqrt(p * (1 - p) / (limit - 1))
    assert found[accuracy].stderr == pytest.approx(expected_error)


@pytest.mark.parametrize("family", ["gpt_neox", "opt", "mamba"])
def test_other_architectures(family, tasks, data, tmp_path):
    """The architectures of the paper's baselines: Pythia, OPT and Mamba."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "opt":
        shape |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=257, **shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    harness_model = HarnessModel(model, byte_tokenizer(), tmp_path)
    score_task(tasks["winogrande"], harness_model, 3)
    (instances,) = [each.instances for each in tasks["winogrande"]["tasks"].values()]
    for instance in instances:
        expected, _ = log_likelihood(model, *instance.args)
        assert instance.resps[-1][0] == pytest.approx(expected, rel=1e-4)


def uniform(make_config, vocab_size):
    """A TokenFormer whose embedding and tied output head are zero."""
    import tokenformer

    shape = {"hidden_size": 8, "num_attention_heads": 1, "max_position_embeddings": 2048}
    config = make_config("tokenformer", vocab_size=vocab_size, **shape)
    model = tokenformer.TokenformerForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    return model


def fewest_tokens_score(task, data, limit, encode, vocab_size):
    """Accuracy of always picking the first choice with the fewest tokens (per character for
    acc_norm)."""
    each = -torch.log(torch.tensor(float(vocab_size)))
    right = []
    for item in items(task, data, limit):
        values = []
        for (context, continuation), choice in zip(item.requests, item.choices, strict=True):
            spaces = len(context) - len(context.rstrip())  # they belong to the continuation
            count = len(encode(context + continuation)) - len(encode(context[: -spaces or None]))
            norm = len(choice) if BENCHMARKS[task].metric == "acc_norm" else 1
            values.append(each.repeat(count).sum().item() / norm)
        right.append(values.index(max(values)) == item.gold)
    return 100 * sum(right) / len(right)


def check_uniform(task, tasks, data, model, tokenizer, limit, folder):
    found = scores(tasks[task], HarnessModel(model, tokenizer, folder), limit)
    size = model.config.vocab_size
    if task == "lambada_openai":
        assert found["acc"].value == 0
        pairs = [item.requests[0] for item in items(task, data, limit)]
        encode = tokenizer.encode
        counts = [len(encode(a + b)) - len(encode(a)) for a, b in pairs]
        expected = size ** (sum(counts) / len(counts))
        assert found["perplexity"].value == pytest.approx(expected, rel=1e-4)
    else:
        expected = fewest_tokens_score(task, data, limit, tokenizer.encode, size)
        assert found[BENCHMARKS[task].metric].value == pytest.approx(expected)


@pytest.mark.parametrize("task", BENCHMARKS)
def test_uniform_logits_take_the_choice_with_the_fewest_tokens(
    task, tasks, data, make_config, tmp_path
):
    model = uniform(make_config, 257)
    check_uniform(task, tasks, data, model, byte_tokenizer(), 25, tmp_path)


def test_uniform_logits_over_the_vocabulary_of_the_paper(
    tasks, data, make_config, neox_tokenizer, tmp_path
):
    model = uniform(make_config, 50304)
    for task in ("arc_easy", "winogrande"):
        check_uniform(task, tasks, data, model, neox_tokenizer, 12, tmp_path / task)


@pytest.mark.slow
@pytest.mark.parametrize("task", BENCHMARKS)
def test_uniform_logits_on_hundreds_of_items(
    task, real_data, make_config, neox_tokenizer, tmp_path
):
    whole = real_data("eval")
    model = uniform(make_config, 50304)
    check_uniform(task, load_tasks([task], whole), whole, model, neox_tokenizer, 300, tmp_path)


def test_truncated_contexts_are_counted(tasks, data, make_model, tmp_path):
    model = make_model("tokenformer", vocab_size=257, max_position_embeddings=100)
    harness_model = HarnessModel(model, byte_tokenizer(), tmp_path)
    score_task(tasks["winogrande"], harness_model, 10)
    requests = [pair for item in items("winogrande", data, 10) for pair in item.requests]
    assert harness_model.truncated == sum(len((c + a).encode()) > 101 for c, a in requests) > 0


@pytest.mark.parametrize("context", ["", "Q", "Question: " * 9], ids=len)
def test_a_continuation_longer_than_the_context_is_scored_in_windows(context, make_model, tmp_path):
    from lm_eval.api.instance import Instance

    model = make_model("tokenformer", vocab_size=257, max_position_embeddings=32)
    answer = " An answer of some length, which goes on and on and on, and then ends."
    harness_model = HarnessModel(model, byte_tokenizer(), tmp_path)
    request = Instance(request_type="loglikelihood", doc={}, arguments=(context, answer), idx=0)
    short = Instance(request_type="loglikelihood", doc={}, arguments=("Q", " a"), idx=1)
    (found, greedy), (beside, _) = harness_model.loglikelihood([request, short])
    ids = [*context.encode(), *answer.encode()]
    ids = ids if context else [END_OF_TEXT, *ids]
    expected, spaces = 0.0, len(context) - len(context.rstrip())  # they belong to the answer
    for place in range(len(ids) - len(answer) - spaces, len(ids)):
        # The first window has targets 1 .. 32, each further one 16 new targets.
        end = 32 if place <= 32 else min(len(ids) - 1, 32 + 16 * -(-(place - 32) // 16))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[end - 32 : place]])).logits[0, -1]
        expected += logits.log_softmax(0)[ids[place]].item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert not greedy
    assert beside == pytest.approx(log_likelihood(model, "Q", " a")[0], rel=1e-5)
    assert harness_model.truncated == 1


def test_scores_do_not_depend_on_batches(tasks, byte_model, tmp_path):
    """Default batches, batches of two, and halved batches after running out of memory."""
    whole = HarnessModel(byte_model, byte_tokenizer(), tmp_path / "whole")
    pairs = HarnessModel(byte_model, byte_tokenizer(), tmp_path / "pairs", batch_size=2)
    halves = HarnessModel(byte_model, byte_tokenizer(), tmp_path / "halves")
    ask, sizes = halves.lm.loglikelihood, []

    def small_memory(batch, disable_tqdm):
        sizes.append(len(batch))
        if len(batch) > 5:
            raise torch.OutOfMemoryError
        return ask(batch, disable_tqdm=disable_tqdm)

    halves.lm.loglikelihood = small_memory
    found = [score_task(tasks["arc_easy"], model, 5) for model in (whole, pairs, halves)]
    assert found[0] == found[1] == found[2]
    assert sorted(sizes) == [5, 5, 5, 5, 10, 10, 20]
    reported = []
    pairs.on_requests = lambda done, of: reported.append((done, of))
    score_task(tasks["arc_easy"], pairs, 5)
    assert reported == [(done, 20) for done in range(2, 21, 2)]


def test_only_the_six_tasks_can_be_read_from_local_files(data):
    with pytest.raises(DataError, match="sciq cannot be read from local files, only lambada_op"):
        load_tasks(["sciq"], data)


def test_an_empty_context_is_end_of_text(byte_model, tmp_path):
    from lm_eval.api.instance import Instance

    harness_model = HarnessModel(byte_model, byte_tokenizer(), tmp_path)
    ask = Instance(request_type="loglikelihood", doc={}, arguments=("", "abc"), idx=0)
    ((found, _),) = harness_model.loglikelihood([ask])
    with torch.no_grad():
        logits = byte_model(input_ids=torch.tensor([[END_OF_TEXT, *b"ab"]])).logits[0]
    expected = logits.log_softmax(-1)[range(3), list(b"abc")].sum().item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_tokenizer_without_special_tokens_is_refused(byte_model, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither a beginning-of-text nor an end-of-text token"):
        HarnessModel(byte_model, tokenizer, tmp_path)


def test_a_perplexity_that_overflows_is_an_error(tasks, byte_model, tmp_path):
    with torch.no_grad():
        byte_model.get_input_embeddings().weight.mul_(1e4)  # and the tied output head
    harness_model = HarnessModel(byte_model, byte_tokenizer(), tmp_path)
    with pytest.raises(DataError, match="lambada_openai: the perplexity overflows"):
        score_task(tasks["lambada_openai"], harness_model, 2)


def test_whole_documents_and_generated_text(byte_model, tmp_path):
    """The other request types of lm-eval."""
    from lm_eval.api.instance import Instance

    harness_model = HarnessModel(byte_model, byte_tokenizer(), tmp_path)
    text = "A document, scored from its beginning."
    rolling = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    ids = torch.tensor([[END_OF_TEXT, *text.encode()]])
    with torch.no_grad():
        logits = byte_model(input_ids=ids[:, :-1]).logits[0]
    expected = logits.log_softmax(-1)[range(len(text)), ids[0, 1:]].sum().item()
    assert harness_model.loglikelihood_rolling([rolling]) == [pytest.approx(expected, rel=1e-5)]

    until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    ask = Instance(request_type="generate_until", doc={}, arguments=("Q:", until), idx=0)
    (found,) = harness_model.generate_until([ask])
    prompt = byte_tokenizer()("Q:", return_tensors="pt")["input_ids"]
    whole = byte_model.generate(prompt, max_new_tokens=8, do_sample=False)[0, 2:]
    assert found == byte_tokenizer().decode(whole, skip_special_tokens=True).partition("\n\n")[0]


def test_an_unreachable_hub_is_a_one_line_error(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError) as error:
        load_tasks(["winogrande"])
    assert str(error.value).startswith("winogrande cannot be loaded: ")
    assert str(error.value).endswith("; use --data DIR to read local files")


@pytest.mark.slow
def test_an_unknown_task_is_an_error_that_suggests_others():
    with pytest.raises(DataError, match="piqq is not a task of lm-eval; did you mean piqa"):
        load_tasks(["hellaswag", "piqq"])
