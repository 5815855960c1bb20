"""Chat templates in the three styles, shortened from what their models come with."""

HERMES = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %} {{ messages[0].content }}{% endif %}
# Tools in <tools></tools>, calls in <tool_call></tool_call>
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') and not (tools and message.role == 'system') %}
<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>
{%- elif message.role == 'assistant' %}
<|im_start|>assistant {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{%- elif message.role == 'tool' %}
<|im_start|>user <tool_response>{{ message.content }}</tool_response><|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' and tools and loop.first %}
<|start_header_id|>user<|end_header_id|>
Answer in the format {"name": function name, "parameters": arguments}.
{%- for tool in tools %}
{{ tool | tojson(indent=4) }}{% endfor %}
{{ message.content }}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
<|start_header_id|>assistant<|end_header_id|>
{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{
message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' %}
<|start_header_id|>ipython<|end_header_id|>
{{ message.content | tojson }}<|eot_id|>
{%- else %}
<|start_header_id|>{{ message.role }}<|end_header_id|>
{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>
{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('ids have 9 letters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson -}}
, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('ids have 9 letters') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}"""

#: As MiniCPM5's: arguments are members of an object, and a text with a special character is CDATA.
MINICPM5 = """\
{{- bos_token }}
{%- if tools %}<|im_start|>system
Signatures in <tools></tools>:
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
Calls: <function name="function-name"><param name="param-name">param-value</param></function><|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '<function name="' ~ call.function.name ~ '">' }}
{%- for name, value in call.function.arguments.items() %}{{ '<param name="' ~ name ~ '">' }}
{%- set text = value if value is string else value | tojson %}
{%- if '<' in text or '&' in text or '\n' in text %}{% set text = '<![CDATA[' ~ text ~ ']]>' %}{% endif %}
{{- text }}
{{- '</param>' }}{% endfor %}{{ '</function>' }}{% endfor %}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{%- endif %}"""

#: Knows no tools; `NO_SYSTEM` refuses systems, too, and wants turns to alternate.
PLAIN = """\
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

NO_SYSTEM = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('turns alternate') }}{% endif -%}
[{{ message.role }}] {{ message.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

#: Leaves out what a system says.
DEAF = """\
{%- for message in messages if message.role != 'system' %}[{{ message.role }}] {{ message.content }}
{% endfor %}"""

#: As Qwen3.5's: a system's message stands in front, or nowhere. `ONE_SYSTEM` leaves later ones out, as
#: gpt-oss's.
STRICT = """\
{%- if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>
{% endif %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
{{- raise_exception('no user') }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif -%}
<|im_start|>{{ message.role }} {{ message.content }}
{%- for call in message.tool_calls or [] %} <tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

ONE_SYSTEM = """\
{%- for message in messages %}
{%- if message.role != 'system' or loop.first %}[{{ message.role }}] {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
