"""The stages of a run: first and last step, and the options of each."""

from dataclasses import dataclass, replace

from tokenformer.train.options import (
    GrowthOptions,
    OptimizerOptions,
    Recipe,
    RunOptions,
    ScheduleOptions,
)


@dataclass(frozen=True)
class Stage:
    index: int
    first_step: int
    """Steps of the run before this stage."""
    optimizer: OptimizerOptions
    schedule: ScheduleOptions
    run: RunOptions
    """`run.steps` are those of this stage."""
    grow: GrowthOptions | None = None

    @property
    def last_step(self) -> int:
        return self.first_step + self.run.steps

    @property
    def anneal_steps(self) -> int | None:
        """Steps over which the scales move after growth; None if they do not."""
        if self.grow is None or self.grow.scale != "anneal":
            return None
        return self.grow.anneal_steps


def plan(recipe: Recipe) -> list[Stage]:
    """Return the stages of a recipe; a recipe without `stages` has one."""
    if not recipe.stages:
        return [Stage(0, 0, recipe.optimizer, recipe.schedule, recipe.run)]
    stages: list[Stage] = []
    for index, options in enumerate(recipe.stages):
        if (index == 0) != (options.grow is None):
            raise ValueError(
                "stages: the first begins with the recipe's model and each later one grows it; "
                f"stage {index + 1} {'has' if options.grow else 'lacks'} `grow`"
            )
        optimizer = recipe.optimizer
        if options.learning_rate is not None:
            optimizer = replace(optimizer, learning_rate=options.learning_rate)
        if options.rates is not None:
            optimizer = replace(optimizer, rates=options.rates)
        run = replace(recipe.run, steps=options.steps)
        if options.batch_size is not None:
            run = replace(run, batch_size=options.batch_size)
        if options.micro_batch_size is not None:
            run = replace(run, micro_batch_size=options.micro_batch_size)
        first = stages[-1].last_step if stages else 0
        schedule = options.schedule or recipe.schedule
        stages.append(Stage(index, first, optimizer, schedule, run, options.grow))
    return stages


def shortened(recipe: Recipe, most: int) -> Recipe:
    """Return the recipe with at most `most` steps, its schedules and warm-ups fitted to them."""
    if not recipe.stages:
        run = replace(recipe.run, steps=min(most, recipe.run.steps))
        return replace(recipe, run=run, schedule=fitted(recipe.schedule, run.steps))
    total = sum(stage.steps for stage in recipe.stages)
    stages = []
    for stage in recipe.stages:
        steps = max(1, stage.steps * min(most, total) // total)
        schedule = fitted(stage.schedule or recipe.schedule, steps)
        stages.append(replace(stage, steps=steps, schedule=schedule))
    return replace(recipe, stages=stages)


def fitted(schedule: ScheduleOptions, steps: int) -> ScheduleOptions:
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, steps // 10))
