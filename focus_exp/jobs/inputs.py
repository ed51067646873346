"""Whether what a run has read is still what its configuration names: texts and weights of the user's own."""

from __future__ import annotations

from focus_exp.config import Config
from focus_exp.data.files import find_texts, revision_of
from focus_exp.errors import UserError
from focus_exp.models.load import revision_of_weights
from focus_exp.records.record import Record
from focus_exp.records.runs import run_folder


def refuse_other_inputs(config: Config, record: Record) -> None:
    """UserError where files have changed since the run began; what is gone has not changed what it found."""
    texts = config.data.files if config.data.source == "files" else None
    for key, place, read, look in (
        ("data.files", texts, record.data, lambda place: revision_of(find_texts(place))),
        ("model.path", config.model.path, record.model, revision_of_weights),
    ):
        if place is None or (then := read.get("revision")) is None:
            continue
        try:
            now = look(place)
        except (UserError, OSError):
            continue
        if now != then:
            what = "text" if key == "data.files" else "model"
            raise UserError(
                f"{key}={place} holds another {what} than when {run_folder(config)} was made ({now}, then {then}); "
                "overwrite=true makes it anew, another runs_dir leaves it alone"
            )
