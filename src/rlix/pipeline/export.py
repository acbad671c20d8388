"""What has been trained, in the form in which others want it."""

import json
import shutil
from pathlib import Path

from rlix.engine.lora import CONFIG_FILE, AdapterConfig
from rlix.protocol.errors import SpecError


def merge_adapter(adapter: Path, output: Path) -> None:
    """Write the model that a PEFT folder's adapter is on, with the adapter in its weights, and its tokenizer.

    Raises:
        SpecError: the folder does not say which model, or that is not there; `output` exists.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if output.exists():
        raise SpecError(f"{output} exists; choose another path")
    AdapterConfig.of_folder(adapter)
    base = json.loads((adapter / CONFIG_FILE).read_text()).get("base_model_name_or_path") or ""
    try:
        model = AutoModelForCausalLM.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise SpecError(f"{adapter / CONFIG_FILE}: its model, {base!r}, cannot be loaded: {error}") from error
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
    for file in Path(base).glob("*token*") if Path(base).is_dir() else ():
        shutil.copy2(file, output / file.name)
