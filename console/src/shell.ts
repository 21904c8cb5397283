// What the whole page knows of its gateway: its models, whether it only shows a recorded run, and the model that is looked at.
import { computed, signal } from "@preact/signals";
import { get } from "./api";
import { route } from "./router";

export interface Shell {
  /** Empty: the root key. */
  project: string;
  /** True: a run's files are shown, nothing runs and nothing can be done. */
  recorded: boolean;
  version: string;
  /** Seconds since 1970; of a recorded run its last event. */
  now: number;
  models: { name: string; trained: boolean }[];
  agents: string[];
}

export const shell = signal<Shell | null>(null);

/** The model that views ask for: of the address (`?model=`), or the gateway's first one. */
export const model = computed(() => route.value.query.get("model") ?? undefined);
export const recorded = computed(() => shell.value?.recorded ?? false);

export async function loadShell(signal: AbortSignal): Promise<Shell> {
  return (shell.value = await get<Shell>("/admin/v1/console", {}, signal));
}
