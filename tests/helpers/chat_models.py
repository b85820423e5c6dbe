"""The bundled model with chat templates of several families: their marks as tokens, their forms in small."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import heterollm.data.tiny_python_lm as tiny

TINY = Path(tiny.__file__).parent


def chat_folder(
    folder: Path, template: str | None, tokens: Sequence[str] = (), words: Sequence[str] = ()
) -> Path:
    """Write the bundled model with a chat template, and tokens in the place of its rarest ones.

    Args:
        folder: The new folder.
        template: Text of the template.
        tokens: Special tokens, without text.
        words: Added tokens with text, such as Qwen's ``<tool_call>``.
    """
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    data = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    model, added = data["model"], [*tokens, *words]
    names = {index: name for name, index in model["vocab"].items()}
    for offset, name in enumerate(added):
        index = len(names) - len(added) + offset
        del model["vocab"][names[index]]
        model["vocab"][name] = index
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        data["added_tokens"].append({"id": index, "content": name, **flags, "special": name in tokens})
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


# What is alike in all of them: a turn's name, its text, and the opening of the answer.
TURNS = """\
{%- macro turn(role, text) -%}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
"""
CHATML = ("<|im_start|>", "<|im_end|>")
OPENING = "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"

HERMES = (
    TURNS
    + """\
{%- if tools -%}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% if not loop.last %}
{% endif %}{% endfor -%}<|im_end|>
{% elif m.role != 'system' or not tools -%}{{ turn(m.role, m.content) }}{% endif -%}
{%- endfor -%}
"""
    + OPENING
)
THINKING = HERMES.replace(
    "{{ m.content }}{% for c",
    """{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c""",
).replace(
    OPENING,
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
    "{% endif -%}",
)
CODER = (
    TURNS
    + """\
{%- if tools -%}<|im_start|>system
{% for tool in tools %}<function><name>{{ tool.function.name }}</name></function>
{% endfor %}Write <tool_call>, <function=…>, <parameter=…>.<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls -%}
<tool_call>
<function={{ c.function.name }}>
{% for key, value in c.function.arguments | items -%}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
</function>
</tool_call>{% endfor -%}<|im_end|>
{% else -%}{{ turn('user' if m.role == 'tool' else m.role, m.content) }}{% endif -%}
{%- endfor -%}
"""
    + OPENING
)
GLM = (
    TURNS
    + """\
{%- if tools -%}{{ turn('system', tools | tojson) }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls -%}
<tool_call>{{ c.function.name }}
{% for key, value in c.function.arguments | items -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor -%}</tool_call>{% endfor -%}<|im_end|>
{% else -%}{{ turn(m.role, m.content) }}{% endif -%}
{%- endfor -%}
"""
    + OPENING
)
LLAMA = (
    TURNS
    + """\
{%- if not tools_in_user_message is defined -%}{%- set tools_in_user_message = true -%}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' and tools and loop.index0 == (messages[0].role == 'system') | int -%}<|im_start|>user
{{ tools | tojson }}
{{ m.content }}<|im_end|>
{% elif m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('only single tool-calls at once') }}{%- endif -%}
<|im_start|>assistant
{%- set f = m.tool_calls[0].function -%}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|im_end|>
{% elif m.role == 'tool' -%}{{ turn('ipython', m.content | tojson) }}
{%- else -%}{{ turn(m.role, m.content) }}{% endif -%}
{%- endfor -%}
"""
    + OPENING
)
MISTRAL_3 = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if loop.last or not tools -%}
{%- if tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
[INST]{% if messages[0].role == 'system' and loop.last %}{{ messages[0].content }}

{% endif %}{{ m.content }}[/INST]
{%- else -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS][INST]{{ m.content }}[/INST]{%- endif -%}
{%- elif m.tool_calls -%}[TOOL_CALLS][{% for c in m.tool_calls -%}
{%- if c.id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif -%}{%- endfor -%}]</s>
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' -%}{{ m.content }}</s>{%- endif -%}
{%- endfor -%}
"""
MISTRAL_11 = MISTRAL_3.replace("[TOOL_CALLS][{% for c", "{% for c").replace(
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif -%}{%- endfor -%}]</s>""",
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
    "{%- endfor -%}</s>",
)
MISTRAL_13 = MISTRAL_11.replace("[CALL_ID]{{ c.id }}", "")
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
LFM = (
    TURNS
    + """\
{%- if tools -%}{{ turn('system', 'List of tools: ' + (tools | tojson)) }}{% endif -%}
{%- for m in messages -%}{{ turn(m.role, m.content) }}{%- endfor -%}
"""
    + OPENING
)
GEMMA_4 = """\
{%- if tools -%}<|turn>system
{% for tool in tools %}<|tool>declaration:{{ tool.function.name }}{}<tool|>{% endfor %}<turn|>
{% endif -%}
{%- macro written(value) -%}
{%- if value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}
{ {%- for k, v in value | items %}{{ k }}:{{ written(v) }}{{ ',' if not loop.last }}{%- endfor -%} }
{%- elif value is sequence -%}[{%- for v in value %}{{ written(v) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|tool_response>response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>
{%- else -%}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% for c in m.tool_calls or [] -%}
<|tool_call>call:{{ c.function.name }}{{ written(c.function.arguments) }}<tool_call|>
{%- endfor -%}{{ m.content }}<turn|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|turn>model
{% endif -%}
"""
GEMMA = (
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
PHI = """\
{%- for m in messages -%}
{%- if m.role == 'system' and m.tools -%}<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>
{%- else -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
PHI_4 = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|tool|>",
    "<|/tool|>",
    "<|tool_call|>",
    "<|/tool_call|>",
)
GRANITE = (
    TURNS
    + """\
{%- if tools -%}{{ turn('available_tools', tools | tojson(indent=4)) }}{% endif -%}
{%- for m in messages -%}{{ turn(m.role, m.content) }}{%- endfor -%}
"""
    + OPENING
)
HARMONY = """\
{%- macro message(header, text) -%}<|start|>{{ header }}<|message|>{{ text }}<|end|>{%- endmacro -%}
{{ message('system', 'Reasoning: ' + (reasoning_effort | default('medium'))) }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}<|start|>developer<|message|>{{ system }}
{% for tool in tools or [] -%}
{{ '// ' + tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor -%}<|end|>{%- endif -%}
{%- set last = namespace(name='') -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'assistant' and "tool_calls" in m -%}
{%- if m.content and m.thinking -%}{{ raise_exception('content and thinking beside a call') }}{%- endif -%}
{%- set thought = m.content or m.thinking -%}
{%- if thought -%}{{ message('assistant<|channel|>analysis', thought) }}{%- endif -%}
{%- set f = m.tool_calls[0].function -%}{%- set last.name = f.name -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' -%}
{{ message('functions.' + last.name + ' to=assistant<|channel|>commentary', m.content | tojson) }}
{%- elif m.role == 'assistant' -%}{{ message('assistant<|channel|>final', m.content) }}
{%- else -%}{{ message(m.role, m.content) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
NO_TOOLS = """\
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}{%- endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}
"""

CHATS: dict[str, tuple[str | None, Sequence[str], Sequence[str]]] = {
    "hermes": (HERMES, CHATML, ("<tool_call>", "</tool_call>")),
    "hermes-text": (HERMES, CHATML, ()),
    "thinking": (THINKING, CHATML, ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "qwen3-coder": (CODER, CHATML, ("<tool_call>", "</tool_call>")),
    "glm": (GLM, (*CHATML, "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>", "</arg_value>"), ()),
    "llama-3": (LLAMA, CHATML, ()),
    "mistral-v3": (MISTRAL_3, MISTRAL, ()),
    "mistral-v11": (MISTRAL_11, (*MISTRAL, "[ARGS]", "[CALL_ID]"), ()),
    "mistral-v13": (MISTRAL_13, (*MISTRAL, "[ARGS]"), ()),
    "lfm2": (LFM, (*CHATML, "<|tool_call_start|>", "<|tool_call_end|>"), ()),
    "gemma-4": (GEMMA_4, GEMMA, ()),
    "gemma-4-text": (GEMMA_4, (), ()),
    "phi-4": (PHI, PHI_4, ()),
    "granite-3": (GRANITE, (*CHATML, "<|tool_call|>"), ()),
    "gpt-oss": (HARMONY, HARMONY_MARKS, ()),
    "gpt-oss-gguf": (HARMONY, HARMONY_MARKS[5:], HARMONY_MARKS[:5]),
    "no-tools": (NO_TOOLS, ("<start_of_turn>", "<end_of_turn>"), ()),
    "plain": (None, (), ()),
}
"""Template, special tokens, added tokens with text. The templates are written for these tests."""
