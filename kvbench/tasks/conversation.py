"""What stands between two answers of a conversation: the end of the one, what the user says, what opens the other."""

from typing import TYPE_CHECKING

from kvbench.tasks.chat import TemplateSettings, render_chat

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

_ANSWER = "kvbenchanswer"  # stands for an answer, whose tokens are the model's own


def between(model: "LoadedModel", said: str, settings: TemplateSettings) -> str:
    """What a chat template writes behind an answer, up to where the next one begins.

    Answers stay in the cache as they were given. So a template that would write the past otherwise, as one that leaves
    thoughts out of it, is not asked to.

    Args:
        model: Its tokenizer has the template.
        said: What the user says.
        settings: What the template is told.

    Raises:
        ValueError: The template fails, or does not show the answers.
    """
    talk = [("user", "a"), ("assistant", _ANSWER), ("user", said)]
    rendered = render_chat(model, [{"role": role, "content": text} for role, text in talk], settings)
    _, answer, rest = rendered.partition(_ANSWER)
    if not answer or said.strip() not in rest:
        raise ValueError(
            f"the chat template of model {model.name} does not show what was said before, so there is no conversation "
            "in it; set protocol.chat_template=never, or repair the template"
        )
    return rest
