"""What all sections of a job spec have in common."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

Count = Annotated[int, Field(gt=0)]
Index = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""To wait at most: thirty years are as good as for ever, and waits of threads end in an error at ten times that."""
Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    bare: ClassVar[str] = ""
    """The field that a text in place of the section stands for; "": there must be a section."""

    @model_validator(mode="before")
    @classmethod
    def _from_bare(cls, value: Any) -> Any:
        return {cls.bare: value} if cls.bare and isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if not cls.bare:
            return schema
        return {"title": schema.pop("title"), "anyOf": [{"type": "string"}, schema]}


def one_or_many(item: Any) -> BeforeValidator:
    """Of a tuple of such items: what is not a list is a list of one."""
    return BeforeValidator(_listed, json_schema_input_type=item | tuple[item, ...])


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def apart(names: Sequence[str]) -> list[str]:
    """Names that are different: `score`, `score_2`."""
    before = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, before, strict=True)]
