"""Tool calling in chat completions.

request.py       what clients send: tools, tool_choice, calls and results in messages
use.py           what a request asks for, put together: ToolUse
templates.py     how a model is shown tools: by its own chat template, or by our description
schemas.py       what a forced call must look like, as one JSON schema
reading.py       reads one JSON call of an answer, piece by piece
parsers.py       finds the calls in an answer, in the format of each family of models
call_filters.py  which of them are the answer's: the first alone, none twice
answering.py     calls as OpenAI's objects, whole and in deltas
"""
