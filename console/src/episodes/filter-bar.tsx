/** The filters above the list. Text is taken over when its field is left or Enter is pressed, menus immediately. */

import { useSignal } from "@preact/signals";
import { filtersOf, NO_FILTERS, rangeOf, searchOf, type Filters } from "./query";
import { saved, toggle, wordsOf } from "./saved";
import type { Facets } from "./types";

interface Props {
  filters: Filters;
  facets: Facets | null;
  models: string[];
  change: (some: Partial<Filters>) => void;
}

interface FieldProps {
  name: string;
  value: string;
  hint: string;
  size: number;
  wrong: boolean;
  change: (value: string) => void;
}

type Name = "text" | "task" | "group" | "agent" | "model" | "mode" | "state" | "reason" | "version" | "reward" | "batch" | "sort";

/** A field of text: what is typed stays while the view around it is drawn again. */
function Field({ name, value, hint, size, wrong, change }: FieldProps) {
  const typed = useSignal<string | null>(null);
  return (
    <input
      name={name}
      value={typed.value ?? value}
      placeholder={hint}
      size={size}
      spellcheck={false}
      autocomplete="off"
      aria-invalid={wrong || undefined}
      title={wrong ? "A number, or a range such as 3..5, 3.. or ..5" : undefined}
      onInput={(event) => (typed.value = event.currentTarget.value)}
      onChange={(event) => {
        typed.value = null;
        change(event.currentTarget.value.trim());
      }}
    />
  );
}

const SORTS = [
  ["", "newest"],
  ["best", "best reward"],
  ["worst", "worst reward"],
  ["longest", "longest"],
] as const;

export function FilterBar({ filters, facets, models, change }: Props) {
  const search = searchOf(filters);
  const field = (name: Name, label: string, hint: string, size: number, range = false) => {
    const wrong = range && rangeOf(filters[name]) === null;
    return (
      <label>
        {label}
        <Field name={name} value={filters[name]} hint={hint} size={size} wrong={wrong} change={(value) => change({ [name]: value })} />
      </label>
    );
  };
  const menu = (name: Name, label: string, values: readonly string[], counts?: Record<string, number>) => {
    const all = filters[name] && !values.includes(filters[name]) ? [filters[name], ...values] : values;
    return (
      <label>
        {label}
        <select name={name} value={filters[name]} onChange={(event) => change({ [name]: event.currentTarget.value })}>
          <option value="">any</option>
          {all.map((value) => (
            <option key={value} value={value}>
              {counts?.[value] === undefined ? value : `${value} (${counts[value]!.toLocaleString("en-US")})`}
            </option>
          ))}
        </select>
      </label>
    );
  };
  const sorted = (counts: Record<string, number> | undefined) =>
    Object.keys(counts ?? {})
      .filter(Boolean)
      .sort((a, b) => counts![b]! - counts![a]!);
  return (
    <details open={!matchMedia("(max-width: 40rem)").matches}>
      <summary class="narrow">{search === "" ? "Filters" : `Filters: ${wordsOf(search)}`}</summary>
      <form class="toolbar filters" role="search" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
        {field("text", "Text", "id, task, group, error", 18)}
        {field("task", "Task", "whole name", 10)}
        {field("group", "Group", "whole name", 10)}
        {menu("reason", "Reason", sorted(facets?.reasons), facets?.reasons)}
        {menu("state", "State", ["open", "grading", "closed"], facets?.states)}
        {menu("mode", "Mode", ["train", "eval"], facets?.modes)}
        {field("version", "Version", "3..5", 6, true)}
        {field("reward", "Reward", "0.5..", 6, true)}
        {field("batch", "Batch", "7", 4)}
        {(facets?.agents.length || filters.agent) ? menu("agent", "Agent", facets?.agents ?? []) : null}
        {models.length > 1 || filters.model ? menu("model", "Model", models) : null}
        <label>
          Sort
          <select name="sort" value={filters.sort} onChange={(event) => change({ sort: event.currentTarget.value })}>
            {SORTS.map(([value, words]) => (
              <option key={value} value={value}>
                {words}
              </option>
            ))}
          </select>
        </label>
        {search !== "" && (
          <button type="button" onClick={() => change(NO_FILTERS)}>
            Clear filters
          </button>
        )}
        {search !== "" && (
          <button type="button" onClick={() => toggle(search)} title="Filters are saved in this browser">
            {saved.value.includes(search) ? "Remove from saved" : "Save filters"}
          </button>
        )}
        {saved.value.length > 0 && (
          <label>
            Saved
            <select value={saved.value.includes(search) ? search : ""} onChange={(event) => change(filtersOf(new URLSearchParams(event.currentTarget.value)))}>
              <option value="">none</option>
              {saved.value.map((one) => (
                <option key={one} value={one}>
                  {wordsOf(one)}
                </option>
              ))}
            </select>
          </label>
        )}
      </form>
    </details>
  );
}
