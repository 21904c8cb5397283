import { Empty } from "../parts/notice";

export function RunView() {
  return (
    <>
      <h1>Run</h1>
      <Empty>This view is being built.</Empty>
    </>
  );
}
