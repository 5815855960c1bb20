"""Tool calling and reasoning.

use.py           ToolUse: one request's tools, and the parser of its answer
prompting.py     ToolPrompt: how the prompt shows the tools
binding.py       ToolBinding: what the tools demand of the answer's tokens
templates.py     messages and tools for chat templates that know tools, and for those that don't
schemas.py       the grammars of calls
reading.py       reads one JSON call of an answer, piece by piece
parsers.py       finds the calls in an answer, in the format of each family of models
minicpm5_parser.py  finds MiniCPM5's calls, which are XML
call_filters.py  which of the calls count: the first alone, or none twice
parsing/         parsers of further formats, and of reasoning
reasoning.py     Reasoning: how the answers to one request think
answering.py     calls as OpenAI's objects, whole and in deltas
"""
