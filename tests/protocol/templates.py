"""Short chat templates, one a family, that write calls as the real ones do."""

_SIMPLE = (
    "{%- if tools -%}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}CALLS{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def _with(calls: str) -> str:
    loop = (
        "{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}{%- set f = c.function -%}"
        + calls
        + "{%- endfor -%}{%- endif -%}"
    )
    return _SIMPLE.replace("CALLS", loop)


_HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
_CODER = (
    "{{ '<tool_call>\n<function=' + f.name + '>' }}{%- for k, v in f.arguments | items -%}{{ '\n<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>' }}{%- endfor -%}{{ '\n</function>\n</tool_call>' }}"
)
_GLM = (
    "{{ '\n<tool_call>' + f.name }}{%- for k, v in f.arguments | items -%}{{ '\n<arg_key>' + k + '</arg_key>\n' }}"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{%- endfor -%}{{ '\n</tool_call>' }}"
)
_DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```<｜tool▁call▁end｜>"
_KIMI = (
    "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
    "<|tool_call_end|>"
)
_HARMONY = " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
_LLAMA = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
_BARE = (
    "{%- macro value(v) -%}{%- if v is string -%}QUOTE{{ v }}QUOTE{%- elif v is mapping -%}{{ '{' }}"
    "{%- for k, x in v | items -%}{{ k }}:{{ value(x) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}"
    "{{ '}' }}{%- elif v is sequence -%}["
    "{%- for x in v -%}{{ value(x) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}]{%- else -%}{{ v | tojson }}"
    "{%- endif -%}{%- endmacro -%}"
)
_MISTRAL = (
    "{%- if m.tool_calls -%}[TOOL_CALLS] [{%- for c in m.tool_calls -%}{%- set f = c.function -%}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{%- if not loop.last -%}, {% endif -%}{%- endfor -%}]{%- endif -%}"
)

TEMPLATES = {
    "hermes": _with(_HERMES),
    "qwen_coder": _with(_CODER),
    "glm": _with(_GLM),
    "deepseek": _with(_DEEPSEEK),
    "kimi": _with(_KIMI),
    "harmony": "{#- <|channel|> -#}" + _with(_HARMONY),
    "llama": "{#- <|eot_id|> -#}" + _with(_LLAMA),
    "gemma4": _BARE.replace("QUOTE", '<|"|>') + _with("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"),
    "functiongemma": _BARE.replace("QUOTE", "<escape>")
    + _with("<start_function_call>call:{{ f.name }}{{ value(f.arguments) }}<end_function_call>"),
    "mistral": _SIMPLE.replace("CALLS", _MISTRAL),
    "mistral_args": _with("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
}
"""Family → template."""
