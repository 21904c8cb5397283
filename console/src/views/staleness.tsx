import { Empty } from "../parts/notice";

export function StalenessView() {
  return (
    <>
      <h1>Staleness</h1>
      <Empty>This view is being built.</Empty>
    </>
  );
}
