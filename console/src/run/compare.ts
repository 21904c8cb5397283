// Two evaluations task by task: where the newer one is better, and where it is worse. Pure.
import type { EpisodeRow } from "../episodes/types";

/** A task's episodes in one evaluation: their mean reward, and one to look at. */
export interface Side {
  mean: number;
  episodes: number;
  first: EpisodeRow;
}

export interface Pair {
  task: string;
  before: Side;
  after: Side;
  by: number;
}

export interface Comparison {
  /** Tasks of both, the largest loss first. */
  pairs: Pair[];
  better: number;
  worse: number;
  /** Tasks that only one of the two has. */
  alone: number;
}

function byTask(episodes: readonly EpisodeRow[]): Map<string, Side> {
  const found = new Map<string, Side>();
  for (const one of episodes) {
    if (one.reward === null) continue;
    const side = found.get(one.task_id);
    if (!side) found.set(one.task_id, { mean: one.reward, episodes: 1, first: one });
    else side.mean += (one.reward - side.mean) / ++side.episodes;
  }
  return found;
}

export function compared(before: readonly EpisodeRow[], after: readonly EpisodeRow[]): Comparison {
  const [old, young] = [byTask(before), byTask(after)];
  const pairs = [...old].flatMap(([task, side]): Pair[] => {
    const other = young.get(task);
    return other ? [{ task, before: side, after: other, by: other.mean - side.mean }] : [];
  });
  pairs.sort((a, b) => a.by - b.by || a.task.localeCompare(b.task));
  return {
    pairs,
    better: pairs.filter((pair) => pair.by > 0).length,
    worse: pairs.filter((pair) => pair.by < 0).length,
    alone: old.size + young.size - 2 * pairs.length,
  };
}
