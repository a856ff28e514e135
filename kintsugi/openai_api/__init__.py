"""The OpenAI API as data: used by the gateway (`serving/`) and by the endpoint for agents (`rollout/user_code/`).

requests.py     requests, strictly decoded      responses.py   choices, chunks, usage
api_errors.py   errors in the API's shape       http.py        bodies, time-outs, authorisation
detokenize.py   text from tokens as they come   tools.py       tool calls in generated text
openapi.py      description for other programs
"""
