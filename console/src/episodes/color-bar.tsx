/** The choice of what colours the tokens, and the legend. */

import { MEANINGS, MODES, NAMES, type Colouring, type Mode } from "./scale";

interface Props {
  colouring: Colouring;
  choose: (mode: Mode) => void;
}

export function ColourBar({ colouring, choose }: Props) {
  return (
    <div class="colour-bar">
      <label>
        Colour by
        <select value={colouring.mode} onChange={(event) => choose(event.currentTarget.value as Mode)}>
          {MODES.map((mode) => (
            <option key={mode} value={mode}>
              {NAMES[mode]}
            </option>
          ))}
        </select>
      </label>
      {colouring.nothing ? (
        <span class="quiet">{colouring.nothing}</span>
      ) : (
        <ul class={`legend ${colouring.mode}`} aria-label={`${NAMES[colouring.mode]}: ${MEANINGS[colouring.mode]}`} title={MEANINGS[colouring.mode]}>
          {colouring.legend.map((entry) => (
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
