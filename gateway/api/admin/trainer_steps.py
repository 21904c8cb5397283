"""`/admin/v1/steps`: the steps that a trainer reports, and the curves of a run; `/admin/v1/runs` and `/admin/v1/evaluations`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, Strict, StringConstraints

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.admin.episodes import Number
from gateway.store import episode_pages, trainer_steps
from gateway.store.trainer_steps import TrainerStep

router = admin_router("Runs")

Id = Annotated[int, Field(ge=0, lt=2**53)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]
OfModel = Annotated[Name | None, Query(description="A trained model; the first one by default.")]


class StepBody(BaseModel):
    """A step that the trainer has done, or the evaluation after it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: Name | None = None
    """The trained model; the first one by default."""
    run: str = Field("", max_length=255)
    """The trainer's name for its run; its curves are found by it."""
    step: Annotated[Id, Strict()]
    version: Annotated[Id, Strict()] | None = None
    """The version that the step made."""
    figures: dict[Name, Number] = Field({}, max_length=1_000)
    """The step's finite figures, by their names in `metrics.jsonl`. They are added to those of an earlier post about the step."""
    folder: str = Field("", max_length=4_096)
    """The run's folder on this machine, from which figures by token are shown; it counts under the root key alone."""


@router.post("/steps")
async def post_step(body: StepBody, access: Admin) -> dict[str, Any]:
    """Store a step of the trainer, and report those who watch."""
    gateway, model = access.gateway, access.trained(body.model).name
    folder = body.folder if access.reach.everything else ""
    step = TrainerStep(model, body.run, body.step, body.version, body.figures, folder)
    fenced = gateway.database.fenced(gateway.coordinator.fence)
    await fenced.submit(lambda c: trainer_steps.store_step(c, step))
    return {"model": model, "run": body.run, "step": body.step}


@router.get("/runs")
async def list_runs(access: Admin, model: OfModel = None) -> dict[str, Any]:
    """Return the runs of trainers, the last updated one first; of one model, or of all within reach."""
    models = access.reach.models if not access.reach.everything else None
    if model is not None:
        models = (await model_in_reach(access, model),)
    return {"runs": await access.gateway.database.read(lambda c: trainer_steps.runs(c, models))}


@router.get("/steps")
async def get_steps(
    access: Admin,
    model: OfModel = None,
    run: Annotated[str | None, Query(max_length=255, description="The newest one by default.")] = None,
    after: Annotated[int, Query(ge=-1, lt=2**53, description="Only later steps.")] = -1,
    points: Annotated[
        int, Query(ge=10, le=100_000, description="Of more steps, every N-th is returned (`every`).")
    ] = 2000,
    figure: Annotated[list[Name] | None, Query(max_length=256, description="Only these.")] = None,
) -> dict[str, Any]:
    """Return the steps of a run by column: step, version, time, and each figure, null where a step has none."""
    name = await model_in_reach(access, model)

    def read(connection: Any) -> dict[str, Any]:
        known = trainer_steps.runs(connection, (name,))
        chosen = run if run is not None else known[0]["run"] if known else ""
        found = trainer_steps.curves(connection, name, chosen, after, points, figure or ())
        return {"model": name, "run": chosen, **asdict(found)}

    return await access.gateway.database.read(read)


@router.get("/evaluations")
async def list_evaluations(access: Admin, model: OfModel = None) -> dict[str, Any]:
    """Return the rewards of a model's evaluation episodes by version, of every program that ran them."""
    name = await model_in_reach(access, model)
    found = await access.gateway.database.read(lambda c: episode_pages.evaluations(c, name))
    return {"model": name, "evaluations": found}


async def model_in_reach(access: Access, model: str | None) -> str:
    """Return a model within reach, by its name; without one the first trained one. Raise NotFound."""
    return await access.recorded(model or access.gateway.models.first(access.reach))
