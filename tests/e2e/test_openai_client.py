#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the `openai` package sees of a running server. Needs no test framework.

    test_openai_client.py BASE_URL [API_KEY]      e.g. http://127.0.0.1:8000/v1

Prints `N passed, M failed`; exit code 1 if anything failed.
"""
import concurrent.futures
import sys
import traceback

import openai

CHAT = [{"role": "user", "content": "Say something."}]
PROMPT = "The quick brown fox"


def whole(client, model, **options):
    return client.completions.create(model=model, prompt=PROMPT, temperature=0, **options)


def test_models(client, model):
    listed = client.models.list().data
    assert [entry.id for entry in listed] == [model]
    assert client.models.retrieve(model).id == model


def test_completion(client, model):
    answer = whole(client, model, max_tokens=8)
    assert answer.object == "text_completion"
    assert answer.model == model
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_completion_stream_equals_whole(client, model):
    answer = whole(client, model, max_tokens=12)
    text, finish, usage = "", None, None
    stream = whole(client, model, max_tokens=12, stream=True,
                   stream_options={"include_usage": True})
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert usage is None, "usage must come last"
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason or finish
    assert text == answer.choices[0].text
    assert finish == answer.choices[0].finish_reason
    assert usage == answer.usage


def test_stream_without_usage_has_none(client, model):
    for chunk in whole(client, model, max_tokens=4, stream=True):
        assert chunk.choices, "a chunk without choices was not asked for"
        assert chunk.usage is None


def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=CHAT, temperature=0,
                                            max_completion_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert isinstance(answer.choices[0].message.content, str)
    assert answer.usage.completion_tokens <= 8


def test_chat_stream_equals_whole(client, model):
    options = dict(model=model, messages=CHAT, temperature=0, max_tokens=12)
    answer = client.chat.completions.create(**options)
    text, roles = "", 0
    first = None
    for chunk in client.chat.completions.create(stream=True, **options):
        delta = chunk.choices[0].delta
        first = first or delta
        roles += delta.role is not None
        text += delta.content or ""
    assert first.role == "assistant" and roles == 1
    assert text == answer.choices[0].message.content


def test_chat_content_parts(client, model):
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    texts = [
        client.chat.completions.create(model=model, messages=messages, temperature=0,
                                       max_tokens=8).choices[0].message.content
        for messages in (CHAT, parts)
    ]
    assert texts[0] == texts[1]


def test_completion_logprobs(client, model):
    logprobs = whole(client, model, max_tokens=5, logprobs=3).choices[0].logprobs
    count = len(logprobs.tokens)
    assert 0 < count <= 5
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == count
    assert len(logprobs.text_offset) == count
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs):
        assert chosen <= 0
        assert 3 <= len(top) <= 4
        assert max(top.values()) >= chosen  # temperature 0 takes the likeliest


def test_chat_logprobs(client, model):
    answer = client.chat.completions.create(model=model, messages=CHAT, temperature=0,
                                            max_tokens=5, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert 0 < len(content) <= 5
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.bytes is not None
    bare = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=2,
                                          logprobs=True)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


def test_echo_with_logprobs(client, model):
    answer = whole(client, model, max_tokens=2, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith(PROMPT)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    expected = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(logprobs.tokens) == expected


def test_two_choices(client, model):
    options = dict(model=model, prompt=PROMPT, n=2, max_tokens=10, temperature=1.0, seed=7)
    answer = client.completions.create(**options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = {0: "", 1: ""}
    finishes = {}
    for chunk in client.completions.create(stream=True, **options):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.index not in finishes
            finishes[choice.index] = choice.finish_reason
    for choice in answer.choices:
        assert texts[choice.index] == choice.text
        assert finishes[choice.index] == choice.finish_reason


def test_seed_repeats(client, model):
    options = dict(model=model, prompt=PROMPT, max_tokens=10, temperature=1.0)
    first = client.completions.create(seed=11, **options).choices[0].text
    again = client.completions.create(seed=11, **options).choices[0].text
    assert first == again


def test_stop(client, model):
    text = whole(client, model, max_tokens=24, extra_body={"ignore_eos": True}).choices[0].text
    assert len(text) > 4
    stop = text[len(text) // 2:][:2]
    cut = whole(client, model, max_tokens=24, stop=[stop], extra_body={"ignore_eos": True})
    assert cut.choices[0].text == text[:text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_extensions(client, model):
    answer = whole(client, model, max_tokens=6,
                   extra_body={"ignore_eos": True, "min_tokens": 6, "top_k": 5, "min_p": 0.1,
                               "repetition_penalty": 1.1})
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "length"


def test_several_prompts(client, model):
    ids = [1, 2, 3]
    answer = client.completions.create(model=model, prompt=[ids, ids], max_tokens=3, temperature=0)
    assert len(answer.choices) == 2
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage.prompt_tokens == 2 * len(ids)


def test_errors(client, model):
    def refused(error, param, **options):
        try:
            client.completions.create(**{"model": model, "prompt": PROMPT, **options})
        except error as caught:
            assert caught.body["message"]
            assert caught.body["param"] == param, caught.body
            return
        raise AssertionError(f"{options} was accepted")

    refused(openai.BadRequestError, "temperature", temperature=3)
    refused(openai.BadRequestError, "n", n=0)
    refused(openai.BadRequestError, "suffix", suffix="x")
    refused(openai.BadRequestError, "nonsense", extra_body={"nonsense": 1})
    refused(openai.NotFoundError, "model", model="no-such-model")
    refused(openai.BadRequestError, "prompt", max_tokens=10**9)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    try:
        client.chat.completions.create(model=model, messages=CHAT, tools=[tool])
        raise AssertionError("tools were accepted")
    except openai.BadRequestError as caught:
        assert caught.body["param"] == "tools"


def test_early_close_frees_the_server(client, model):
    for _ in range(3):
        stream = whole(client, model, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    assert whole(client, model, max_tokens=2).choices


def test_eight_at_once(client, model):
    expected = whole(client, model, max_tokens=10).choices[0].text
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: whole(client, model, max_tokens=10).choices[0].text,
                              range(8)))
    assert texts == [expected] * 8


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    key = sys.argv[2] if len(sys.argv) > 2 else "none"
    client = openai.OpenAI(base_url=sys.argv[1], api_key=key, max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    passed = failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test(client, model)
            passed += 1
        except Exception:  # every failure is reported, the rest still runs
            failed += 1
            print(f"FAILED {name}", file=sys.stderr)
            traceback.print_exc()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
