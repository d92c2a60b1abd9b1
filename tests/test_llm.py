"""The user's side: prompts in any form, answers in order, mistakes refused one by one."""

import json
import warnings
import weakref

import pytest
from tiny_checkpoint import END, STOP, VOCAB_SIZE, make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.cuda_graphs import no_garbage_collection
from minivllm.output.processor import derive_seed

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint directory."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_llm(checkpoint, **settings):
    """An engine on the tiny checkpoint that checks its invariants in every step."""
    defaults = {"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 4, "progress": False}
    llm = LLM(str(checkpoint), **(defaults | settings))
    llm.engine.check_invariants = True
    return llm


@pytest.fixture(scope="module")
def llm(checkpoint):
    """One engine for the tests that leave nothing behind."""
    with make_llm(checkpoint) as llm:
        yield llm
        assert not llm.has_unfinished_requests()
        assert llm.engine.memory.pool.num_free == 40


def generate(llm, prompts, params=GREEDY):
    """Without a progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)


# -- generate --


def test_a_prompt_may_be_text_token_ids_or_a_dict(llm):
    """All three forms of one prompt give one answer."""
    forms = ["abc", [97, 98, 99], {"prompt_token_ids": [97, 98, 99]}]
    outputs = generate(llm, forms)
    assert [o.prompt_token_ids for o in outputs] == [[97, 98, 99]] * 3
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["abc", None, None]


def test_one_prompt_alone_gives_a_list_of_one(llm):
    """A string, a list of ids and a dict on their own are one prompt each."""
    for prompt in ("abc", [97, 98, 99], {"prompt_token_ids": [97, 98, 99]}):
        assert len(generate(llm, prompt)) == 1


def test_answers_come_in_the_order_of_the_prompts(llm):
    """Though the short ones are done first."""
    prompts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 2, 7, 3)
    ]
    outputs = generate(llm, prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5, 2, 7, 3]


def test_no_prompts_give_no_answers(llm):
    """An empty batch is not a mistake."""
    assert generate(llm, []) == []


def test_text_is_the_decoded_answer(llm):
    """Text and ids say the same."""
    answer = generate(llm, "abc")[0].outputs[0]
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert answer.finish_reason == "length"


def test_default_parameters_are_used_where_none_are_given(llm):
    """vLLM's default: 16 tokens."""
    assert len(llm.generate("abc", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_each_prompt_may_have_its_own_parameters_but_the_number_must_fit(llm):
    """Two prompts, three settings: refused with both numbers, nothing queued."""
    with pytest.raises(ValueError, match="2 prompts and 3 sampling_params"):
        generate(llm, ["a", "b"], [GREEDY] * 3)
    assert not llm.has_unfinished_requests()


# -- refusals, each for one request alone --


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([1, VOCAB_SIZE], f"{VOCAB_SIZE} in the prompt is not a token id.*to {VOCAB_SIZE - 1}"),
        ([1, -1], "-1 in the prompt is not a token id"),
        ([1, 2.5], "2.5 in the prompt is not a token id"),
        ([1, True], "True in the prompt is not a token id"),
        ({"text": "a"}, "key 'prompt' or 'prompt_token_ids'"),
        (None, "None is not a prompt"),
        ("x" * 128, "128 tokens.*max_model_len=128"),
    ],
)
def test_a_bad_prompt_in_a_list_fails_alone(llm, prompt, words):
    """Its output says why; the prompts around it are answered."""
    with pytest.warns(UserWarning, match=words):
        outputs = generate(llm, ["abc", prompt, "abd"])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 0, 6]


def test_a_bad_prompt_alone_raises(llm):
    """No other answer is waited for, so an exception loses nothing."""
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(llm, "")
    with pytest.raises(ValueError, match="128 tokens"):
        generate(llm, "x" * 128)


def test_the_longest_prompt_leaves_room_for_one_token(llm):
    """127 of 128 tokens: one is answered, then the length is reached."""
    output = generate(llm, "x" * 127)[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_an_answer_stops_at_max_model_len(llm):
    """Without a limit of its own it ends with "length" and never writes past its row."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = generate(llm, "x" * 100, params)[0]
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


def test_request_ids_in_use_are_refused(llm):
    """The first of that id goes on."""
    llm.add_request("abc", GREEDY, "mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        llm.add_request("abd", GREEDY, "mine")
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert [o.request_id for o in outputs] == ["mine"]
    llm.add_request("abc", GREEDY, "mine")
    assert llm.abort("mine")


def test_unknown_keywords_are_refused_by_name(checkpoint):
    """A typing mistake must not be ignored."""
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM(str(checkpoint), max_num_seq=4)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)


# -- stopping --


def test_several_end_tokens_end_an_answer(checkpoint):
    """Those of generation_config.json, and more from the request."""
    with make_llm(checkpoint) as llm:
        assert set(llm.engine.eos_token_ids) == {END, STOP}
        free = generate(llm, "abc")[0].outputs[0]
        params = SamplingParams(
            temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[free.token_ids[2]]
        )
        answer = generate(llm, "abc", params)[0].outputs[0]
        first = free.token_ids.index(free.token_ids[2])
        assert answer.token_ids == free.token_ids[: first + 1]
        assert answer.finish_reason == "stop"


def test_the_models_own_end_tokens_count_unless_ignored(checkpoint):
    """`ignore_eos` is what benchmarks use."""
    with make_llm(checkpoint) as llm:
        free = generate(llm, "abc")[0].outputs[0].token_ids
        llm.engine.eos_token_ids = (free[3],)
        params = SamplingParams(temperature=0, max_tokens=6)
        answer = generate(llm, "abc", params)[0].outputs[0]
        assert answer.token_ids == free[: free.index(free[3]) + 1]
        assert answer.finish_reason == "stop"
        assert generate(llm, "abc")[0].outputs[0].token_ids == free


# -- batching, memory and time never change an answer --


def test_answers_are_the_same_in_any_company(checkpoint):
    """Alone, together, in chunks, from the cache, and with too little memory for all."""
    prompts = ["abcdefgh", "abcdefgh", "abcdefghij", "xyz", "the end", "q"]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def answers(**settings):
        with make_llm(checkpoint, **settings) as llm:
            outputs = generate(llm, prompts, params) + generate(llm, prompts, params)
            return [o.outputs[0].token_ids for o in outputs], outputs

    expected, _ = answers(max_num_seqs=1, enable_prefix_caching=False)
    assert answers()[0] == expected
    assert answers(max_num_batched_tokens=4)[0] == expected
    cramped, outputs = answers(num_kv_blocks=9, max_model_len=36)
    assert cramped == expected
    assert sum(o.num_preemptions for o in outputs) > 0
    cached, outputs = answers(max_num_seqs=2)
    assert cached == expected
    assert sum(o.num_cached_tokens for o in outputs) > 0


def test_a_seed_gives_the_same_tokens_in_any_batch(llm):
    """The noise depends on seed and position, not on the company."""
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=7)
    other = SamplingParams(temperature=1.5, max_tokens=9, ignore_eos=True)
    alone = generate(llm, "abc", params)[0].outputs[0].token_ids
    for prompts in (["abc", "zz"], ["zz", "y", "abc"]):
        mixed = [params if prompt == "abc" else other for prompt in prompts]
        outputs = generate(llm, prompts, mixed)
        assert outputs[prompts.index("abc")].outputs[0].token_ids == alone


def test_requests_without_a_seed_differ_and_runs_repeat(checkpoint):
    """Two equal prompts get two answers; the same engine seed gives the same two again."""
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)

    def run(seed):
        with make_llm(checkpoint, seed=seed) as llm:
            outputs = generate(llm, ["abc", "abc"], params)
            return [tuple(o.outputs[0].token_ids) for o in outputs]

    first = run(1)
    assert first[0] != first[1]
    assert run(1) == first
    assert run(2) != first


def test_derived_seeds_are_all_different():
    """Over requests and over engine seeds."""
    seeds = {derive_seed(engine, number) for engine in range(50) for number in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- one request at a time --


def test_step_returns_the_answers_that_end_with_it(llm):
    """Requests of 1 and of 3 tokens."""
    for number, count in enumerate((1, 3)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm.add_request("abc", params, f"r{number}")
    assert [[o.request_id for o in llm.step()] for _ in range(3)] == [["r0"], [], ["r1"]]
    assert llm.step() == [], "with nothing to do a step does nothing"


def test_generate_leaves_other_requests_alone(llm):
    """Answers of `add_request` that end meanwhile are kept for the next `step`."""
    llm.add_request("abc", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), "mine")
    assert len(generate(llm, ["abd"])) == 1
    assert [o.request_id for o in llm.step()] == ["mine"]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_ends_waiting_and_running_requests(llm, steps):
    """True once; afterwards nothing of that id is known."""
    llm.add_request("abc", GREEDY, "mine")
    for _ in range(steps):
        llm.step()
    assert llm.abort("mine")
    assert not llm.abort("mine")
    assert not llm.has_unfinished_requests()


def test_abort_of_an_unknown_or_finished_request_is_false(llm):
    """It may have ended a moment before."""
    assert not llm.abort("never seen")
    request_id = generate(llm, "abc")[0].request_id
    assert not llm.abort(request_id)


def test_metrics_tell_the_times_of_a_request(llm):
    """Queue time <= time to first token; one latency fewer than tokens."""
    metrics = generate(llm, "abc")[0].metrics
    assert 0 <= metrics.queue_time <= metrics.time_to_first_token
    assert len(metrics.token_times) == 6
    assert len(metrics.inter_token_latencies) == 5
    assert all(latency > 0 for latency in metrics.inter_token_latencies)
    assert metrics.finished_time >= metrics.token_times[-1]


# -- when something breaks --


def test_after_an_interrupt_the_engine_is_as_good_as_new(checkpoint):
    """Ctrl-C in the middle of a step: the call's requests are gone, the next call works."""
    with make_llm(checkpoint) as llm:
        expected = generate(llm, ["abc", "abd"])
        model, calls = llm.engine.runner.model, []

        def breaking(*arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return model(*arguments)

        breaking.logits, breaking.config = model.logits, model.config
        llm.engine.runner.model = breaking
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["abc", "abd"])
        assert not llm.has_unfinished_requests()
        assert llm.engine.memory.pool.num_free == 40
        again = generate(llm, ["abc", "abd"])
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]


def test_a_schedule_that_can_do_nothing_is_an_error_and_no_endless_loop(checkpoint):
    """Should the scheduler ever be stuck, the loop says so."""
    with make_llm(checkpoint) as llm:
        llm.add_request("abc", GREEDY)
        llm.engine.scheduler.max_num_batched_tokens = 0
        with pytest.raises(RuntimeError, match="cannot do anything"):
            llm.step()
        llm.engine.scheduler.max_num_batched_tokens = 64


# -- settings and the end --


def test_settings_in_force_are_all_filled_in(llm, checkpoint):
    """Nothing is None, and the directory is the one given."""
    assert all(value is not None for value in vars(llm.config).values())
    assert llm.config.model_path == str(checkpoint)
    assert llm.config.max_model_len == 128


def test_a_small_cache_lowers_max_model_len_or_refuses_the_one_asked_for(checkpoint):
    """8 blocks of 4 hold 32 tokens."""
    with make_llm(checkpoint, num_kv_blocks=8) as llm:
        assert llm.config.max_model_len == 32
    with pytest.raises(ValueError, match="max_model_len=64 does not fit.*max_model_len=32 would"):
        make_llm(checkpoint, num_kv_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match="max_model_len=999 is more than.*128"):
        make_llm(checkpoint, max_model_len=999)


def test_too_little_memory_is_one_message_with_numbers(checkpoint):
    """A share so small that no block fits: weights, activations and KV are told apart."""
    words = "no block.*Weights take 0 MiB, activations up to.*KV cache may take 0 MiB"
    with pytest.raises(ValueError, match=words):
        make_llm(checkpoint, num_kv_blocks=None, memory_utilization=1e-9)


def test_devices_and_types_that_do_not_exist_are_refused(checkpoint):
    """With what would work instead."""
    with pytest.raises(ValueError, match="device='tpu9000' must be auto, cpu, cuda"):
        make_llm(checkpoint, device="tpu9000")
    with pytest.raises(ValueError, match="device='cuda:99'.*sees"):
        make_llm(checkpoint, device="cuda:99")
    with pytest.raises(ValueError, match="dtype='int8'"):
        make_llm(checkpoint, dtype="int8")


def test_close_can_be_called_twice_and_ends_use(checkpoint):
    """Afterwards every use says so."""
    llm = make_llm(checkpoint)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("abc")


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "taped"])
def test_close_gives_the_memory_back_at_once(checkpoint, enforce_eager):
    """Python's next search for garbage may be far away."""
    with no_garbage_collection():
        llm = make_llm(checkpoint, attention_backend="torch", enforce_eager=enforce_eager)
        generate(llm, "abc")
        runner = llm.engine.runner
        kept = [weakref.ref(thing) for thing in (runner, runner.model, runner.kv_cache[0])]
        del runner
        llm.close()
        assert [reference() for reference in kept] == [None] * 3


def test_two_engines_live_side_by_side(checkpoint):
    """No state is shared between them."""
    with make_llm(checkpoint) as one, make_llm(checkpoint, block_size=8) as two:
        expected = generate(one, "abc")[0].outputs[0].token_ids
        assert generate(two, "abc")[0].outputs[0].token_ids == expected
        one.close()
        assert generate(two, "abc")[0].outputs[0].token_ids == expected


def test_the_trace_tells_each_step(checkpoint):
    """One prompt of 5 tokens in chunks of 4, then decodes."""
    with make_llm(checkpoint, trace=True, max_num_batched_tokens=4) as llm:
        generate(llm, "abcde", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        steps = llm.trace.steps
    chunks = [(c.start, c.length, c.is_decode, c.samples) for step in steps for c in step.chunks]
    assert chunks == [
        (0, 4, False, False),
        (4, 1, False, True),
        (5, 1, True, True),
        (6, 1, True, True),
    ]
    assert [step.finished for step in steps][-1] == ("request-0",)
    assert [len(step.block_tables["request-0"]) for step in steps] == [2, 2, 2, 2]


def test_without_a_trace_nothing_is_recorded(llm):
    """It is free when off."""
    assert llm.trace is None


def test_control_tokens_count_in_prompts_and_are_text_in_chats(llm):
    """A program may write them into a prompt; what a user says in a chat is only text."""
    assert generate(llm, "<|start|>a")[0].prompt_token_ids == [256, 97]
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": "<|end|>"}])
    assert ids.count(END) == 1, "the template's own, not the user's"


def test_a_bfloat16_engine_answers_too(checkpoint):
    """The same code in the other type."""
    with make_llm(checkpoint, dtype="bfloat16") as llm:
        assert llm.config.dtype == "bfloat16"
        assert len(generate(llm, "abc")[0].outputs[0].token_ids) == 6


def test_the_checkpoint_says_what_auto_means(checkpoint, tmp_path):
    """A float32 checkpoint runs in float32 on a CPU."""
    assert json.loads((checkpoint / "config.json").read_text())["torch_dtype"] == "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make_llm(checkpoint, device="cpu") as llm:
            assert llm.config.dtype == "float32"


# -- several answers, conversations, streams ------------------------------------------------


def test_n_answers_share_the_prompt_and_differ(checkpoint):
    """The prompt is computed once: the others find its blocks in the prefix cache."""
    with make_llm(checkpoint, trace=True) as llm:
        params = SamplingParams(n=3, seed=7, max_tokens=5, ignore_eos=True)
        (output,) = generate(llm, list(range(20)), params)
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
        chunks = [chunk for step in llm.trace.steps for chunk in step.chunks]
        computed = [chunk.length for chunk in chunks if not chunk.is_decode]
        assert computed == [20, 4, 4], "16 of 20 tokens are whole blocks of 4, the last is not"
        again = generate(llm, list(range(20)), params)
        assert [a.token_ids for a in again[0].outputs] == [a.token_ids for a in output.outputs]
        # Each answer is what its seed gives on its own.
        for index, answer in enumerate(output.outputs):
            alone = SamplingParams(seed=7 + index, max_tokens=5, ignore_eos=True)
            assert generate(llm, list(range(20)), alone)[0].outputs[0].token_ids == answer.token_ids


def test_n_answers_can_be_aborted_before_the_others_have_begun(checkpoint):
    """The whole prompt goes, whatever of it is under way."""
    for steps in range(3):
        with make_llm(checkpoint) as llm:
            request_id = llm.add_request("abc", SamplingParams(n=4, max_tokens=9, ignore_eos=True))
            for _ in range(steps):
                llm.step()
            assert llm.abort(request_id)
            assert not llm.has_unfinished_requests()
            assert llm.engine.memory.pool.num_free == 40


def test_chat_answers_what_the_template_makes_of_the_messages(llm):
    """One conversation or several; the same as generating from the template's ids."""
    hello = [{"role": "user", "content": "Hi"}]
    longer = [*hello, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    outputs = llm.chat([hello, longer], GREEDY, use_tqdm=False)
    prompts = [llm.tokenizer.apply_chat_template(messages) for messages in (hello, longer)]
    expected = generate(llm, prompts)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]
    assert outputs[0].prompt == "<|start|>user\nHi<|end|><|start|>assistant\n"
    assert llm.chat(hello, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs


def test_a_bad_conversation_in_a_list_fails_alone(llm):
    """The others are answered; on its own it raises."""
    hello = [{"role": "user", "content": "Hi"}]
    with pytest.warns(UserWarning, match="a message is"):
        outputs = llm.chat([hello, ["Hi"]], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error"]
    with pytest.raises(ValueError, match="a message is"):
        llm.chat([], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_pieces_of_a_stream_are_the_text(checkpoint, overlap):
    """And its output is that of `generate`."""
    with make_llm(checkpoint, overlap=overlap) as llm:
        (expected,) = generate(llm, "abc")
        stream = llm.stream("abc", GREEDY)
        assert stream.output is None
        pieces = list(stream)
        assert len(pieces) > 1
        assert "".join(pieces) == expected.outputs[0].text == stream.output.outputs[0].text
        assert stream.output.outputs == expected.outputs
        assert list(stream) == [], "it is over"
        hello = [{"role": "user", "content": "Hi"}]
        chat = llm.chat(hello, GREEDY, use_tqdm=False)[0].outputs[0].text
        assert "".join(llm.stream(hello, GREEDY)) == chat


def test_two_streams_and_a_request_go_on_together(checkpoint):
    """Asking one for a piece lets the others go on, and no output is lost."""
    with make_llm(checkpoint) as llm:
        expected = [o.outputs[0].text for o in generate(llm, ["abc", "xyz", "uvw"])]
        first, second = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
        other = llm.add_request("uvw", GREEDY)
        texts = ["".join(first), "".join(second)]
        assert texts == expected[:2]
        (output,) = llm.step()
        assert (output.request_id, output.outputs[0].text) == (other, expected[2])


@pytest.mark.parametrize("leave", ["close", "break", "abort"])
def test_a_stream_that_is_left_early_frees_its_memory(checkpoint, leave):
    """By hand, by leaving the loop, or from outside."""
    with make_llm(checkpoint) as llm:
        stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        next(stream)
        if leave == "close":
            stream.close()
            assert list(stream) == []
        elif leave == "abort":
            llm.abort(stream.request_id)
            assert list(stream) == []
            assert stream.output is None
        else:
            del stream
        assert not llm.has_unfinished_requests()
        assert llm.engine.memory.pool.num_free == 40


def test_a_stream_outlives_its_llm_without_harm(checkpoint):
    """Closing it after the engine has gone does nothing."""
    llm = make_llm(checkpoint)
    stream = llm.stream("abc", GREEDY)
    llm.close()
    stream.close()


def test_only_one_answer_can_be_streamed(llm):
    """Which of several would the pieces belong to?"""
    with pytest.raises(ValueError, match="n=2: only one answer"):
        llm.stream("abc", SamplingParams(n=2))


# -- the end of an answer ---------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(checkpoint, overlap):
    """The tokens up to the one that completed it are kept; memory comes back."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with make_llm(checkpoint, overlap=overlap) as llm:
        full = generate(llm, "abc", params)[0].outputs[0]
        stop = full.text[4:7]  # several tokens: they are bytes
        place = full.text.find(stop)
        with_stop = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
        answer = generate(llm, "abc", with_stop)[0].outputs[0]
        assert answer.text == full.text[:place]
        assert answer.finish_reason == "stop"
        text = llm.tokenizer.decode(answer.token_ids)
        assert text.startswith(full.text[: place + len(stop)]), "its tokens are kept"
        assert stop not in llm.tokenizer.decode(answer.token_ids[:-1])
        assert "".join(llm.stream("abc", with_stop)) == answer.text
        while llm.has_unfinished_requests():
            llm.step()
        assert llm.engine.memory.pool.num_free == 40


def test_stop_strings_of_one_request_do_not_touch_another(llm):
    """Every request has its own."""
    full = generate(llm, ["abc", "abc"])[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=full.text[1])
    outputs = generate(llm, ["abc", "abc"], [params, GREEDY])
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert outputs[1].outputs[0] == full


def test_the_token_that_ended_an_answer_is_not_in_its_text(checkpoint):
    """It is in `token_ids`; its text is shown only where that was asked for."""
    with make_llm(checkpoint) as llm:
        full = generate(llm, "abc")[0].outputs[0]
        token = full.token_ids[2]
        place = full.token_ids.index(token)
        for shows in (False, True):
            params = SamplingParams(
                temperature=0,
                max_tokens=6,
                ignore_eos=True,
                stop_token_ids=(token,),
                include_stop_str_in_output=shows,
            )
            answer = generate(llm, "abc", params)[0].outputs[0]
            assert answer.token_ids == full.token_ids[: place + 1]
            assert answer.text == llm.tokenizer.decode(full.token_ids[: place + shows])


# -- overlapped ----------------------------------------------------------------------------


def test_overlapped_engines_give_the_same_answers(checkpoint):
    """Random and greedy, with waiting, several answers, and ends at different times."""
    prompts = ["abc", "some longer prompt", "x", "yz", "abc"]
    params = [SamplingParams(max_tokens=5 + 3 * i, seed=i, n=1 + i % 2) for i in range(5)]
    answers = []
    for overlap in (False, True):
        with make_llm(checkpoint, overlap=overlap, max_num_seqs=3) as llm:
            assert llm.config.overlap is overlap
            outputs = generate(llm, prompts, params)
            answers.append([[a.token_ids for a in o.outputs] for o in outputs])
            assert not llm.has_unfinished_requests() or llm.step() == []
    assert answers[0] == answers[1]


# -- one process, several engines --------------------------------------------------------------


def test_close_gives_the_memory_back(checkpoint):
    """Nothing holds on to the weights or the KV cache, and the next engine can have them."""
    llm = make_llm(checkpoint)
    generate(llm, "abc")
    kept = [weakref.ref(x) for x in (llm.engine.runner.kv_cache, llm.engine.runner.model)]
    llm.close()
    assert [ref() for ref in kept] == [None, None]
    with make_llm(checkpoint) as following:
        assert generate(following, "abc")
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("abc")


def test_the_checkpoint_recommends_the_default_sampling(checkpoint, tmp_path):
    """Where no parameters are given, those of generation_config.json count."""
    path = make_checkpoint(tmp_path / "model")
    recommended = {"eos_token_id": END, "do_sample": False, "top_k": 5}
    (path / "generation_config.json").write_text(json.dumps(recommended))
    with make_llm(path) as llm:
        assert llm.get_default_sampling_params().temperature == 0
        greedy = SamplingParams(temperature=0, max_tokens=16)
        expected = generate(llm, "abc", greedy)[0].outputs[0].token_ids
        for _ in range(2):
            assert llm.generate("abc", use_tqdm=False)[0].outputs[0].token_ids == expected
            assert "".join(llm.stream("abc")) == llm.tokenizer.decode(expected)


# -- logprobs and the other knobs, end to end ------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_come_with_each_token(checkpoint, overlap):
    """The chosen one and the most probable ones, with rank and text, one table a token."""
    with make_llm(checkpoint, overlap=overlap) as llm:
        params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
        plain, ranked = generate(llm, ["abc", "abc"], [GREEDY, params])
        assert plain.outputs[0].logprobs is None
        assert plain.outputs[0].cumulative_logprob is None
        answer = ranked.outputs[0]
        assert len(answer.logprobs) == len(answer.token_ids) == 6
        total = 0.0
        for token_id, table in zip(answer.token_ids, answer.logprobs):
            assert token_id in table
            assert {1, 2} <= {entry.rank for entry in table.values()}
            assert len(table) in (2, 3)
            assert all(e.decoded_token == llm.tokenizer.decode([i]) for i, e in table.items())
            total += table[token_id].logprob
        assert answer.cumulative_logprob == pytest.approx(total)


def test_logprobs_end_with_the_stop_string(checkpoint):
    """As many tables as tokens, whatever ended the answer."""
    with make_llm(checkpoint, overlap=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)
        text = generate(llm, "abc", params)[0].outputs[0].text
        stopping = SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, stop=text[5:7]
        )
        answer = generate(llm, "abc", stopping)[0].outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.stop_reason == text[5:7]
        assert len(answer.logprobs) == len(answer.token_ids) < 30


def test_token_ids_that_the_model_does_not_know_are_refused(llm):
    """At the door, with the number: on the device they would fail every request."""
    for params in (
        SamplingParams(logit_bias={VOCAB_SIZE: 1.0}),
        SamplingParams(stop_token_ids=(VOCAB_SIZE,)),
    ):
        with pytest.raises(ValueError, match=f"token id={VOCAB_SIZE} must be .* to 258"):
            llm.generate("abc", params, use_tqdm=False)


def test_the_token_that_stopped_an_answer_is_named(checkpoint):
    """An id of the request's own is the reason; the model's end token is none."""
    with make_llm(checkpoint) as llm:
        first = generate(llm, "abc")[0].outputs[0].token_ids[0]
        own = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(first,))
        assert generate(llm, "abc", own)[0].outputs[0].stop_reason == first
        forced = SamplingParams(temperature=0, max_tokens=6, logit_bias={END: 100.0})
        answer = generate(llm, "abc", forced)[0].outputs[0]
        assert (answer.token_ids, answer.finish_reason) == ([END], "stop")
        assert (answer.text, answer.stop_reason) == ("", None)


@pytest.mark.parametrize("overlap", [False, True])
def test_min_tokens_puts_the_end_off(checkpoint, overlap):
    """The end token is impossible before, however likely it is."""
    with make_llm(checkpoint, overlap=overlap) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, logit_bias={END: 100.0})
        answer = generate(llm, "abc", params)[0].outputs[0]
        assert len(answer.token_ids) == 5
        assert answer.token_ids[-1] == END
        assert END not in answer.token_ids[:-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_see_every_token_up_to_the_last(checkpoint, overlap):
    """With a strong presence penalty and few possible tokens, none comes twice."""
    with make_llm(checkpoint, overlap=overlap) as llm:
        bias = dict.fromkeys(range(100, 106), 50.0)
        params = SamplingParams(
            temperature=0, max_tokens=6, ignore_eos=True, logit_bias=bias, presence_penalty=2.0
        )
        flat = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias=bias)
        answer, repeating = generate(llm, ["abc", "abc"], [params, flat])
        assert len(set(answer.outputs[0].token_ids)) > len(set(repeating.outputs[0].token_ids))


def test_the_backend_is_chosen_by_the_device_and_can_be_forced(checkpoint):
    """On a CPU its own kernels and plain PyTorch give the same greedy answers."""
    answers = []
    for name, expected in (("auto", "cpu"), ("cpu", "cpu"), ("torch", "torch")):
        with make_llm(checkpoint, attention_backend=name, device="cpu") as llm:
            assert llm.config.attention_backend == expected
            answers.append(generate(llm, "abc")[0].outputs[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(ValueError, match="'flash' must be one of auto, torch, cpu"):
        make_llm(checkpoint, attention_backend="flash")
