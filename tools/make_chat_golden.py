#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/chat/golden.json: conversations rendered by Jinja2 from the templates beside it.

    python3 tools/make_chat_golden.py

Needs `pip install jinja2`. qwen3.jinja and smollm2.jinja are the checkpoints' own templates
(Apache-2.0); chatml.jinja, qwen2.5.jinja, llama3.jinja and llama3.1.jinja are written here after the
published formats, without the parts for tools.
"""

import json
import pathlib

from jinja2.sandbox import ImmutableSandboxedEnvironment

DATA = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "chat"

CONVERSATIONS = [
    [("user", "Hello!")],
    [("system", "Be brief. "), ("user", " What is 2+2?\n"),
     ("assistant", "<think>\nTwo and two.\n</think>\n\nIt is 4."), ("user", "And\n3+3?")],
    [("user", "a"), ("assistant", "<think>\n\nhm\n</think>\n\n\nb"), ("assistant", "c"), ("system", "s"),
     ("assistant", "x</think>y</think>\n\nz")],
    [("user", "a"), ("assistant", "no thought")],
    [("assistant", "first"), ("system", "then")],
    [("user", "q"), ("user", "<tool_response>\n1\n</tool_response>"), ("assistant", "<think>\nt\n</think>\n\nu"),
     ("user", "<tool_response>2</tool_response> not only")],
    [("system", ""), ("user", "\u3000\u00a0 wide \u001f\u2003\n"), ("assistant", "\n\n</think>\n"), ("user", "\n")],
    [("user", "x"), ("assistant", "<think>a<think>\nb\n\n</think>\n\nc</think>d")],
]


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    cases = []
    for path in sorted(DATA.glob("*.jinja")):
        name = path.name.removesuffix(".jinja")
        template = env.from_string(path.read_text(encoding="utf-8"))
        for index, messages in enumerate(CONVERSATIONS):
            for generate in (True, False) if index < 2 else (True,):
                for thinking in ((None, False, True) if name == "qwen3" and generate else (None,)):
                    extra = {} if thinking is None else {"enable_thinking": thinking}
                    text = template.render(messages=[{"role": r, "content": c} for r, c in messages],
                                           add_generation_prompt=generate, bos_token="<|begin_of_text|>", **extra)
                    cases.append({"format": name, "conversation": index, "add_generation_prompt": generate,
                                  "enable_thinking": thinking, "text": text})
    out = DATA / "golden.json"
    golden = {"conversations": CONVERSATIONS, "cases": cases}
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
    print(out.name, len(cases), "cases", out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
