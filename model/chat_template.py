"""The plain chat template, for a tokenizer that has none, so that any base model can be given chats.

    System:              a system message (none is added)
    be brief

    User:
    How are you?

    Assistant:
    Fine.</s>            the tokenizer's own end token closes the turn

A blank line separates turns; the tokenizer's bos token, if it has one, opens the chat; texts are trimmed. Saved with an
adapted model, so that serving renders what training saw.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from model.errors import UserError

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('the plain chat template knows no role ' + message['role']) }}"
    "{% endif %}"
    "{{ message['role'] | capitalize + ':\n' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give a tokenizer without a chat template the plain one; True when that was needed (say so to the user).

    Raises UserError where it has no end token either (an answer could never end), and for a template that is no text
    and no set of named ones with a default.
    """
    template = tokenizer.chat_template
    if template:
        if not isinstance(template, str) and not (isinstance(template, dict) and "default" in template):
            raise UserError(
                f"The chat template of {tokenizer.name_or_path or 'the model'} is no text and has no named template "
                "'default': write one into its chat_template.jinja."
            )
        return False
    if not tokenizer.eos_token:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path or 'the model'} has neither a chat template nor an end token: "
            "set eos_token in its tokenizer_config.json."
        )
    tokenizer.chat_template = PLAIN_TEMPLATE
    return True
