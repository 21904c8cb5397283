/** The choice of what colors the tokens, and the legend. */

import { MEANINGS, MODES, NAMES, type Coloring, type Mode } from "./scale";

interface Props {
  coloring: Coloring;
  choose: (mode: Mode) => void;
}

export function ColorBar({ coloring, choose }: Props) {
  return (
    <div class="color-bar">
      <label>
        Color by
        <select value={coloring.mode} onChange={(event) => choose(event.currentTarget.value as Mode)}>
          {MODES.map((mode) => (
            <option key={mode} value={mode}>
              {NAMES[mode]}
            </option>
          ))}
        </select>
      </label>
      {coloring.nothing ? (
        <span class="quiet">{coloring.nothing}</span>
      ) : (
        <ul class={`legend ${coloring.mode}`} aria-label={`${NAMES[coloring.mode]}: ${MEANINGS[coloring.mode]}`} title={MEANINGS[coloring.mode]}>
          {coloring.legend.map((entry) => (
            <li key={entry.label} class={entry.count ? "" : "none"}>
              <span class={`swatch ${entry.cls}`} />
              {entry.label} <span class="quiet">({entry.count.toLocaleString("en-US")})</span>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
